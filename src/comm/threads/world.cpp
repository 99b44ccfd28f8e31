#include "comm/threads/world.h"

#include "comm/threads/group.h"

namespace isomer {

World::World(int num_ranks, double timeout_s) : timeout_s_(timeout_s) {
  for (int rank = 0; rank < num_ranks; ++rank) ranks_.push_back(std::make_unique<Rank>());
}

void World::join(int rank, const std::atomic<std::uint64_t>& heartbeat) {
  Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  state.heartbeat = &heartbeat;
}

void World::leave(int rank) {
  Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  if (state.heartbeat != nullptr) state.last_heartbeat = state.heartbeat->load(std::memory_order_relaxed);
  state.heartbeat = nullptr;
  state.left = true;
}

void World::fail(int rank, Failure failure) {
  std::lock_guard lock(mutex_);
  if (failed_rank_ >= 0) return;
  failed_rank_ = rank;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
}

void World::explain(int rank, Failure failure) {
  fail(rank, failure);
  std::lock_guard lock(mutex_);
  if (failed_rank_ == rank && failure_.message.empty()) failure_ = std::move(failure);
}

Failure World::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void World::begin_wait(int rank, const Call* call) {
  Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  state.waiting = true;
  state.waits_in = call;
}

void World::end_wait(int rank) {
  Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  state.waiting = false;
  state.waits_in = nullptr;
}

void World::completed(int rank) {
  Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  ++state.completed;
}

bool World::has_left(int rank) const {
  const Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  return state.left;
}

bool World::is_waiting(int rank) const {
  const Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  return state.waiting;
}

std::string World::doing(int rank) const {
  const Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  return state.waits_in == nullptr ? std::string() : fmt::format(" (it waits in {})", describe(*state.waits_in));
}

std::uint64_t World::beat(int rank) const {
  const Rank& state = *ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(state.mutex);
  const auto heartbeat =
      state.heartbeat != nullptr ? state.heartbeat->load(std::memory_order_relaxed) : state.last_heartbeat;
  return heartbeat + state.completed + (state.left ? 1 : 0);
}

std::uint64_t World::progress() const {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) sum += beat(rank);
  return sum;
}

std::shared_ptr<ThreadsGroup> World::group(int id, const std::vector<int>& members) {
  std::lock_guard lock(mutex_);
  auto& known = groups_[{id, members}];
  auto group = known.lock();
  if (!group) {
    group = std::make_shared<ThreadsGroup>(*this, members);
    known = group;
  }
  return group;
}

}  // namespace isomer
