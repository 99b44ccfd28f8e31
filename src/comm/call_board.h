// What processes of one machine show of themselves to each other and to the process that launched them: whether they
// get anywhere, and in which call they are. It stands in shared memory that the launcher makes, so that it outlives
// whoever is killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace isomer {

enum class RankState : std::uint32_t { absent, running, in_call, ended, failed, ended_by_launcher };

/// One rank's place, written by that rank alone. All zeros: no rank has come here.
struct CallSlot {
  static constexpr std::size_t kMaxText = 248;

  std::atomic<RankState> state{RankState::absent};
  std::atomic<std::uint32_t> current{0};  // of `calls`: the other one is being written
  std::atomic<std::uint64_t> ticks{0};    // grows while the process runs, whatever it does
  char calls[2][kMaxText] = {};           // empty: none yet

  void begin_call(std::string_view call);
  void end_call() { change(RankState::in_call, RankState::running); }
  /// Nothing where the state is another than `from`: how a rank ended stays.
  void change(RankState from, RankState to) { state.compare_exchange_strong(from, to, std::memory_order_acq_rel); }
  /// The call begun last, as text that ends with 0.
  const char* call() const { return calls[current.load(std::memory_order_acquire)]; }
};
static_assert(std::atomic<RankState>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

class CallBoard {
 public:
  /// Made by the launcher, for ranks that it starts.
  static std::unique_ptr<CallBoard> create(int num_ranks);
  /// Made by another process of this machine; null where `path` is no such board (on another machine, say).
  static std::unique_ptr<CallBoard> open(const std::string& path);
  ~CallBoard();
  CallBoard(const CallBoard&) = delete;
  CallBoard& operator=(const CallBoard&) = delete;

  /// Where other processes of this machine open it while the launcher lives.
  std::string path() const;
  int num_ranks() const { return num_ranks_; }
  CallSlot& slot(int rank) { return slots_[rank]; }
  const CallSlot& slot(int rank) const { return slots_[rank]; }

  /// " (it waits in all_gather 'k' (forward))", " (its last call was …)"; empty where the rank is on another machine.
  std::string doing(int rank) const;
  /// A line for each rank that ended without a word of its own: which, and in or after which call. Nothing where a rank
  /// has failed, which ends the others.
  std::string lost() const;

 private:
  CallBoard(int file, int num_ranks, void* memory);
  int file_;
  int num_ranks_;
  CallSlot* slots_;
};

/// Tells, for the launcher, a process that stands still from one that works.
class ProcessWatch {
 public:
  ProcessWatch(const CallBoard& board, double timeout_s);
  /// To be asked again and again. A line about a rank whose process has stood still for the timeout; empty: none.
  std::string verdict(double now_s);

 private:
  struct Seen {
    std::uint64_t ticks = 0;
    double still_s = 0;
  };
  const CallBoard& board_;
  double timeout_s_;
  double last_s_ = 0;
  std::unique_ptr<Seen[]> seen_;
};

}  // namespace isomer
