// The dry run's transport: nothing moves and nobody waits, except for control calls (split, reports), which are real.
// Dry ranks run one after another: a rank runs while it holds the baton, and hands it on where it meets such a call.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "comm/threads/group.h"

namespace isomer {

class Baton {
 public:
  /// Ranks 0 … num_ranks−1 wait from the start, so that they begin in order.
  explicit Baton(int num_ranks);
  /// Waits until this rank is the lowest that waits and nobody runs.
  void acquire(int rank);
  void release();
  /// Ranks from `rank` on will not run.
  void skip_from(int rank);

 private:
  void wake_first();

  std::mutex mutex_;
  std::vector<std::condition_variable> changed_;  // one a rank, since a thousand sleepers should not all wake
  std::set<int> waiting_;
  bool held_ = false;
};

class DryTransport : public Transport {
 public:
  DryTransport(std::shared_ptr<ThreadsTransport> control, Baton& baton)
      : Transport({}), control_(std::move(control)), baton_(baton) {}

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  int world_rank(int group_rank) const override { return control_->world_rank(group_rank); }
  Latest exchange(const Call& call) override;
  std::shared_ptr<Transport> subgroup(const std::vector<int>& members, int id) override;
  void abandon() override { control_->abandon(); }

 private:
  std::shared_ptr<ThreadsTransport> control_;
  Baton& baton_;
};

}  // namespace isomer
