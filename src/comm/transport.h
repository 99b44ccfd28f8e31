// Transport: what a backend must do, namely move the blocks of one call between ranks and say when the last of them
// was ready. It knows nothing of tensors, ledgers or clocks, and is called by one thread of a rank only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/block.h"
#include "core/record.h"
#include "core/virtual_clock.h"

namespace isomer {

/// One call as one rank makes it.
struct Call {
  Collective collective = Collective::barrier;
  std::string tensor;
  Phase phase = Phase::setup;
  DType dtype = DType::f32;
  bool control = false;        // a few bytes for decisions and reports: no ledger, no link; real in a dry run too
  bool drop = false;           // tests: leave the receive buffers as they are
  std::vector<Block> send;     // [group size], or one block to `destination`
  std::vector<Block> receive;  // [group size], or one block from `source`
  bool pairwise = false;
  int destination = -1;  // group ranks; −1: none
  int source = -1;
  double ready_s = 0;       // when this rank may begin, on its virtual clock and
  double ready_wall_s = 0;  // on the machine's

  std::int64_t bytes_to_others(int rank) const;
  std::int64_t bytes_from_others(int rank) const;
};

/// The control call by which a rank says that its body has returned.
inline constexpr const char* kEndOfRun = "end of the run";

/// "all_to_all 'q' (forward)".
std::string describe(const Call& call);
std::string describe(Collective collective, std::string_view tensor, Phase phase);
/// With the element type where one travels: "all_to_all 'q' (forward) of bf16".
std::string describe_with_type(const Call& call);
/// True if the ranks that made these calls mean the same collective.
bool same_call(const Call& a, const Call& b);
/// "rank 2: all_to_all 'q' (forward): what".
std::string call_error(int world_rank, const Call& call, std::string_view what);

/// When the last of the ranks in a call was ready.
struct Latest {
  double ready_s = 0;
  double ready_wall_s = 0;
};
Latest later(const Latest& a, const Latest& b);

struct TransportOptions {
  LinkModel link;          // its bandwidth measured where the user gave none
  bool real_time = false;  // transfers take at least the link's time in wall time
};

class Transport {
 public:
  explicit Transport(const TransportOptions& options) : options_(options) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const TransportOptions& options() const { return options_; }
  /// Before the first call that is timed.
  void set_bandwidth(double bytes_per_s) { options_.link.bandwidth_bytes_per_s = bytes_per_s; }
  virtual int rank() const = 0;  // in this group
  virtual int size() const = 0;
  virtual int world_rank(int group_rank) const = 0;

  /// Does the call with the ranks it needs; returns when this rank's receive blocks are filled and its send blocks
  /// are read. Throws isomer::Error if a peer failed, left, stalled or called something else.
  virtual Latest exchange(const Call& call) = 0;
  /// The ranks `members` of this group, in their new order, as a group of their own. `id` is new to each of them and
  /// the same for all. Sends nothing.
  virtual std::shared_ptr<Transport> subgroup(const std::vector<int>& members, int id) = 0;
  /// This rank is unwinding from an exception: its peers must not wait for it, nor it for them.
  virtual void abandon() = 0;
  /// Called now and then by the rank's communication thread while it has nothing to do.
  virtual void idle() {}
  /// How often idle() wants to be called; 0: never.
  virtual double idle_interval_s() const { return 0; }

 private:
  TransportOptions options_;
};

}  // namespace isomer
