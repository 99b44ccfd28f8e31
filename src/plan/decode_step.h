// How long one decode step takes, and where the time goes.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/decode_operations.h"

namespace isomer {

/// Seconds of one step over all layers, by what they are spent on.
struct StepTime {
  double core = 0;         // attention over the cache
  double projections = 0;  // the rest of the attention block, collectives apart
  double exchange = 0;     // partial results between slices
  double attention_links = 0;
  double ffn = 0;
  double ffn_links = 0;
  double head = 0;
  double pipeline = 0;
  double hidden = 0;       // of core and exchange, by running beside each other
  std::int64_t parts = 1;  // of the batch, under HOP-B
  double total() const {
    return core + projections + exchange + attention_links + ffn + ffn_links + head + pipeline - hidden;
  }
};

/// Names of the parts of a step in the order of StepTime's members, hidden apart, and their seconds.
struct StepShare {
  const char* name;
  double seconds;
};
std::vector<StepShare> shares_of(const StepTime& time);

/// Prices steps of one problem, layout after layout. What layouts have in common is priced once: attention while its
/// axes stay the same from call to call, FFNs for good.
class StepPricer {
 public:
  StepPricer(const DecodeProblem& problem, const Hardware& hardware) : problem_(problem), hardware_(hardware) {}
  StepTime operator()(const DecodeLayout& layout, std::int64_t batch);

 private:
  /// Of one layer.
  struct Attention {
    double core = 0, exchange = 0, compute = 0, links = 0, hidden = 0;
    std::int64_t parts = 1;
  };
  /// Of one layer, and of a step's ends.
  struct Rest {
    double dense = 0, dense_links = 0, moe = 0, moe_links = 0, head = 0, boundary = 0;
  };
  struct RestKey {
    std::uint64_t axes;
    std::int64_t tokens;
    bool operator==(const RestKey&) const = default;
  };
  struct RestHash {
    std::size_t operator()(const RestKey& key) const;
  };
  const Attention& attention(const DecodeLayout& layout, std::int64_t batch);
  const Rest& rest(const DecodeLayout& layout, std::int64_t batch);
  Attention price_attention(const DecodeLayout& layout, std::int64_t batch);
  Rest price_rest(const DecodeLayout& layout, std::int64_t batch);

  const DecodeProblem& problem_;
  const Hardware& hardware_;
  DecodeOperations operations_;
  DecodeLayout attention_layout_;                                        // whose attention is kept
  std::vector<std::pair<std::int64_t, Attention>> attention_by_tokens_;  // tokens of a group
  std::unordered_map<RestKey, Rest, RestHash> rest_;
};

/// One step alone.
StepTime decode_step_time(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                          std::int64_t batch);

/// B parts of c seconds of compute and m of exchange each, the exchange of one beside the compute of the next:
/// B·c + m if c ≥ m, else c + B·m. While both run, each takes `contention` times as long; never more than B·(c + m).
double overlapped_seconds(double parts, double compute_s, double exchange_s, double contention);

/// One operation of the step, priced over all layers.
struct PricedOperation {
  Operation operation;
  double seconds = 0;      // over the whole step
  std::int64_t times = 1;  // in a step
  std::string bound;       // "memory", "arithmetic", "link bandwidth", "link latency", "launch", "kernel efficiency"
};
/// Every operation of a step, longest first.
std::vector<PricedOperation> priced_operations(const DecodeProblem& problem, const Hardware& hardware,
                                               const DecodeLayout& layout, std::int64_t batch);

/// What bounds an operation: the largest of its ideal times, or, where they are under a third of its time, `launch` if
/// that is short, else `kernel efficiency`.
std::string bound_of(const Hardware& hardware, const Operation& operation);

}  // namespace isomer
