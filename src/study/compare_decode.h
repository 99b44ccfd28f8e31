// `compare --phase decode`: one model, one context, one batch, every decode layout on the same ranks; each held against
// one rank in float64.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "study/decode_run.h"

namespace isomer {

struct DecodeCompareOptions {
  DecodeWorkload workload;
  GroupOptions group;
  std::vector<std::string> layouts;  // as given
  std::string weights_source, cache_source;
  std::function<void(const std::string& layout, const std::map<std::string, Tensor>& tensors)> results;  // at rank 0
  std::function<void(int rank, const std::string& name, const Tensor& tensor)> dump;  // "<layout>/…" names
};

/// One row of the table.
struct DecodeLayoutReport {
  std::string name, layout;
  bool exact = true, dry = false;
  DecodeRun run;                                     // logits dropped
  std::int64_t cache_bytes = 0;                      // of the rank that has most
  std::int64_t bytes_sent = 0, bytes_predicted = 0;  // a step, by the rank that sends most; by the closed form
  double bytes_uniform = 0;                          // where rows travel to experts: on average, uniform routing
  bool bytes_agree = false;                          // on every rank
  double max_logit_error = 0, bound = 0;             // against float64; its bound (design contract 10)
  std::int64_t first_different_token = -1;           // step whose greedy token is another than float64's; −1: none
  bool difference_excused = true;                    // there the two best logits are closer than the bound
  std::string note;                                  // copies of the cache, say

  bool within_bound() const;
  bool good() const { return bytes_agree && (!exact || within_bound()); }
};

struct DecodeCompareReport {
  DecodeCompareOptions options;
  std::vector<DecodeLayoutReport> layouts;
  struct Omitted {
    std::string layout, reason;
  };
  std::vector<Omitted> omitted;
  double max_reference = 0;  // largest |logit|
  bool good() const;
  /// Whether one rank in this dtype is off by so much itself that staying in the bound says little: a bound above a
  /// tenth of the largest logit.
  bool bound_says_little() const;
};

/// Every family and its variants on so many ranks, whether they fit or not.
std::vector<std::string> all_decode_layouts(const ModelConfig& config, int num_ranks);

/// Bytes that a rank sends in one step by the closed forms (cost/decode_bytes.h), all layers of its stage. `routed`: of
/// all its layers together; without it, where rows travel to experts, uniform routing's average.
double decode_step_bytes(const ModelConfig& config, const DecodeLayout& layout, int rank, std::int64_t batch,
                         std::int64_t context, std::int64_t element_bytes, const RoutedRows* routed = nullptr);

/// Runs all layouts. A dry run traces one layer of each kind on one of the ranks that do the same, and counts it for
/// all of them. Under MPI only rank 0's report is complete.
DecodeCompareReport compare_decode(const DecodeCompareOptions& options, const ModelWeights& weights,
                                   const std::function<void(const std::string&)>& progress);

/// The JSON twin of the table (docs/json.md).
nlohmann::json to_json(const DecodeCompareReport& report);

}  // namespace isomer
