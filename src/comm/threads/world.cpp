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

double StallWatch::age_s(Seen& seen, std::uint64_t value, double now_s) {
  if (seen.since_s == 0 || seen.value != value) seen = {value, now_s};
  return now_s - seen.since_s;
}

std::string StallWatch::verdict(int rank) {
  if (world_.failed()) return world_.failure().reason;
  if (world_.has_left(rank)) return fmt::format("rank {} left", rank);
  const double now_s = wall_clock_s();
  const double silent_s = age_s(beats_[rank], world_.beat(rank), now_s);
  const double standstill_s = age_s(progress_, world_.progress(), now_s);
  // A peer that itself waits is as alive as those it waits for.
  const double stalled_s = world_.is_waiting(rank) ? std::min(silent_s, standstill_s) : silent_s;
  if (stalled_s < world_.timeout_s()) return {};
  return fmt::format("rank {} showed no sign of life for {:g} s{}", rank, world_.timeout_s(), world_.doing(rank));
}

}  // namespace isomer
