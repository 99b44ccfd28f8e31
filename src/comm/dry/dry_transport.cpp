#include "comm/dry/dry_transport.h"

namespace isomer {

Baton::Baton(int num_ranks) : changed_(static_cast<std::size_t>(num_ranks)) {
  for (int rank = 0; rank < num_ranks; ++rank) waiting_.insert(rank);
}

void Baton::acquire(int rank) {
  std::unique_lock lock(mutex_);
  waiting_.insert(rank);
  changed_[static_cast<std::size_t>(rank)].wait(lock, [&] { return !held_ && *waiting_.begin() == rank; });
  waiting_.erase(rank);
  held_ = true;
}

void Baton::release() {
  std::lock_guard lock(mutex_);
  held_ = false;
  wake_first();
}

void Baton::skip_from(int rank) {
  std::lock_guard lock(mutex_);
  waiting_.erase(waiting_.lower_bound(rank), waiting_.end());
  wake_first();
}

void Baton::wake_first() {
  if (!held_ && !waiting_.empty()) changed_[static_cast<std::size_t>(*waiting_.begin())].notify_one();
}

Latest DryTransport::exchange(const Call& call) {
  if (!call.control) return {};
  const int world_rank = control_->world_rank(rank());
  World& world = control_->world();
  baton_.release();
  const auto take_turn = [&] {
    world.begin_wait(world_rank, nullptr);
    baton_.acquire(world_rank);
    world.end_wait(world_rank);
  };
  try {
    control_->exchange(call);
  } catch (...) {
    take_turn();
    throw;
  }
  take_turn();
  return {};
}

std::shared_ptr<Transport> DryTransport::subgroup(const std::vector<int>& members, int id) {
  auto control = std::static_pointer_cast<ThreadsTransport>(control_->subgroup(members, id));
  return std::make_shared<DryTransport>(std::move(control), baton_);
}

}  // namespace isomer
