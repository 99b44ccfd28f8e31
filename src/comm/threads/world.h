// What the ranks of one process know of each other: who runs, waits, left or failed; and the signs of life by which a
// rank that waits tells a slow peer from a stalled one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/failure.h"
#include "comm/stall_watch.h"
#include "comm/transport.h"

namespace isomer {

class ThreadsGroup;

class World : public SignsOfLife {
 public:
  World(int num_ranks, double timeout_s);

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  double timeout_s() const override { return timeout_s_; }

  /// The rank runs from here on; `heartbeat` must live until it leaves.
  void join(int rank, const std::atomic<std::uint64_t>& heartbeat);
  void leave(int rank);

  /// The first failure ends the run. Without a message (the rank unwinds) it waits to be explained.
  void fail(int rank, Failure failure);
  /// What `rank` threw, now that it is known; the same as fail if the run has not failed, nothing if another did.
  void explain(int rank, Failure failure);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;

  /// Brackets the time in which `rank` waits for peers inside `call` (null: for its turn in a dry run).
  void begin_wait(int rank, const Call* call);
  void end_wait(int rank);
  /// A call of this rank is complete, which is a sign of life.
  void completed(int rank);

  std::string failure_reason() const override { return failed() ? failure().reason : ""; }
  bool has_left(int rank) const override;
  bool is_waiting(int rank) const override;
  std::string doing(int rank) const override;
  std::uint64_t beat(int rank) const override;
  std::uint64_t progress() const override;

  /// The group of these world ranks; the same object for all who ask while one of them holds it.
  std::shared_ptr<ThreadsGroup> group(int id, const std::vector<int>& members);

 private:
  struct Rank {
    mutable std::mutex mutex;
    const std::atomic<std::uint64_t>* heartbeat = nullptr;
    std::uint64_t last_heartbeat = 0;  // of a rank that has left
    std::uint64_t completed = 0;
    const Call* waits_in = nullptr;
    bool waiting = false;
    bool left = false;
  };
  std::vector<std::unique_ptr<Rank>> ranks_;
  double timeout_s_;
  mutable std::mutex mutex_;
  std::map<std::pair<int, std::vector<int>>, std::weak_ptr<ThreadsGroup>> groups_;
  std::atomic<bool> failed_{false};
  int failed_rank_ = -1;
  Failure failure_;
};

}  // namespace isomer
