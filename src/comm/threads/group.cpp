#include "comm/threads/group.h"

#include <algorithm>
#include <chrono>

#include "comm/giving_way.h"

namespace isomer {

namespace {

Latest ready(const Call& call) { return {call.ready_s, call.ready_wall_s}; }

}  // namespace

ThreadsGroup::ThreadsGroup(World& world, std::vector<int> members)
    : world_(world), members_(std::move(members)), changed_(members_.size()), posted_(members_.size()) {}

void ThreadsGroup::give_up(int rank, const Call& call, const std::string& reason) {
  const std::string message = call_error(world_rank(rank), call, reason);
  broken_ = true;
  world_.fail(world_rank(rank), {reason, message});
  wake_all();
  throw Error(message);
}

void ThreadsGroup::wake_all() {
  for (auto& changed : changed_) changed.notify_all();
}

template <class Missing>
void ThreadsGroup::wait(Lock& lock, int rank, const Call& call, const Missing& missing) {
  if (give_way_until(lock, [&] { return missing().empty(); })) return;
  const double interval_s = std::min(0.05, world_.timeout_s() / 10);
  double next_check_s = wall_clock_s() + interval_s;
  StallWatch watch(world_);
  world_.begin_wait(world_rank(rank), &call);
  for (auto peers = missing(); !peers.empty(); peers = missing()) {
    std::string verdict = world_.failure_reason();
    if (wall_clock_s() >= next_check_s) {
      next_check_s += interval_s;
      for (std::size_t i = 0; i < peers.size() && verdict.empty(); ++i) verdict = watch.verdict(world_rank(peers[i]));
    }
    if (!verdict.empty()) {
      world_.end_wait(world_rank(rank));
      give_up(rank, call, verdict);
    }
    changed_[static_cast<std::size_t>(rank)].wait_for(lock, std::chrono::duration<double>(interval_s));
  }
  world_.end_wait(world_rank(rank));
}

Latest ThreadsGroup::collective(int rank, const Call& call) {
  arrive(rank, call);
  // From here on every member is inside the call and copies for a bounded time, so nobody may throw before all have
  // done so: a peer might still read this rank's memory.
  Latest latest;
  for (const Call* posted : posted_) latest = later(latest, ready(*posted));
  const std::string mismatch = copy_from_all(rank, call);
  depart(rank);
  if (!mismatch.empty()) {
    Lock lock(mutex_);
    give_up(rank, call, mismatch);
  }
  return latest;
}

void ThreadsGroup::arrive(int rank, const Call& call) {
  Lock lock(mutex_);
  if (broken_ || world_.failed()) give_up(rank, call, world_.failure_reason());
  for (std::size_t peer = 0; peer < posted_.size(); ++peer) {
    if (posted_[peer] != nullptr && !same_call(*posted_[peer], call))
      give_up(rank, call, fmt::format("rank {} issued {} instead", members_[peer], describe_with_type(*posted_[peer])));
  }
  const std::uint64_t round = opened_ + 1;
  posted_[static_cast<std::size_t>(rank)] = &call;
  if (++num_arrived_ == std::ssize(members_)) {
    num_arrived_ = 0;
    num_done_ = 0;
    opened_ = round;
    wake_all();
    return;
  }
  try {
    wait(lock, rank, call, [&] {
      std::vector<int> missing;
      for (int peer = 0; opened_ < round && peer < std::ssize(posted_); ++peer) {
        if (posted_[static_cast<std::size_t>(peer)] == nullptr) missing.push_back(peer);
      }
      return missing;
    });
  } catch (...) {
    posted_[static_cast<std::size_t>(rank)] = nullptr;
    throw;
  }
}

std::string ThreadsGroup::copy_from_all(int rank, const Call& call) const {
  const auto self = static_cast<std::size_t>(rank);
  for (std::size_t peer = 0; peer < posted_.size(); ++peer) {
    const auto sent = posted_[peer]->send[self].bytes();
    if (sent != call.receive[peer].bytes())
      return fmt::format("rank {} sends {} bytes, {} expected", members_[peer], sent, call.receive[peer].bytes());
  }
  if (call.drop) return {};
  // Each rank starts with its own block and goes round, so that not all read the same rank's memory at once.
  for (std::size_t step = 0; step < posted_.size(); ++step) {
    const std::size_t peer = (self + step) % posted_.size();
    copy_block(posted_[peer]->send[self], call.receive[peer]);
  }
  return {};
}

void ThreadsGroup::depart(int rank) {
  Lock lock(mutex_);
  const std::uint64_t round = opened_;
  if (++num_done_ == std::ssize(members_)) {
    std::fill(posted_.begin(), posted_.end(), nullptr);
    closed_ = round;
    wake_all();
    return;
  }
  const auto closed = [&] { return closed_ >= round; };
  if (!give_way_until(lock, closed)) changed_[static_cast<std::size_t>(rank)].wait(lock, closed);
}

Latest ThreadsGroup::pairwise(int rank, const Call& call) {
  Lock lock(mutex_);
  if (world_.failed()) give_up(rank, call, world_.failure_reason());
  Latest latest = ready(call);
  Message message{&call};
  if (call.destination >= 0) {
    channels_[{rank, call.destination}].push_back(&message);
    changed_[static_cast<std::size_t>(call.destination)].notify_all();
  }
  try {
    if (call.source >= 0) latest = later(latest, receive(lock, rank, call));
    if (call.destination >= 0) {
      wait(lock, rank, call, [&] { return message.taken ? std::vector<int>{} : std::vector<int>{call.destination}; });
      changed_[static_cast<std::size_t>(rank)].wait(lock, [&] { return message.done; });
      latest = later(latest, message.receiver);
    }
  } catch (...) {
    if (call.destination >= 0) withdraw(lock, rank, call.destination, message);
    throw;
  }
  return latest;
}

void ThreadsGroup::withdraw(Lock& lock, int rank, int destination, Message& message) {
  if (message.taken) {
    changed_[static_cast<std::size_t>(rank)].wait(lock, [&] { return message.done; });
  } else {
    std::erase(channels_[{rank, destination}], &message);
  }
}

Latest ThreadsGroup::receive(Lock& lock, int rank, const Call& call) {
  auto& channel = channels_[{call.source, rank}];
  wait(lock, rank, call, [&] { return channel.empty() ? std::vector<int>{call.source} : std::vector<int>{}; });
  Message& message = *channel.front();
  const Call& peer = *message.call;
  const int source = world_rank(call.source);
  if (peer.tensor != call.tensor || peer.dtype != call.dtype)
    give_up(rank, call, fmt::format("rank {} issued {} instead", source, describe_with_type(peer)));
  const auto sent = peer.send[0].bytes();
  if (sent != call.receive[0].bytes())
    give_up(rank, call, fmt::format("rank {} sends {} bytes, {} expected", source, sent, call.receive[0].bytes()));
  channel.pop_front();
  message.taken = true;
  const Latest latest = ready(peer);
  lock.unlock();
  if (!call.drop) copy_block(peer.send[0], call.receive[0]);
  lock.lock();
  message.receiver = ready(call);
  message.done = true;
  changed_[static_cast<std::size_t>(call.source)].notify_all();
  return latest;
}

Latest ThreadsTransport::exchange(const Call& call) {
  const Latest latest = call.pairwise ? group_->pairwise(rank_, call) : group_->collective(rank_, call);
  group_->world().completed(world_rank(rank_));
  return latest;
}

std::shared_ptr<Transport> ThreadsTransport::subgroup(const std::vector<int>& members, int id) {
  std::vector<int> world_ranks;
  int rank = 0;
  for (std::size_t member = 0; member < members.size(); ++member) {
    world_ranks.push_back(world_rank(members[member]));
    if (members[member] == rank_) rank = static_cast<int>(member);
  }
  return std::make_shared<ThreadsTransport>(options(), group_->world().group(id, world_ranks), rank);
}

void ThreadsTransport::abandon() {
  const int rank = world_rank(rank_);
  group_->world().fail(rank, {fmt::format("rank {} threw an exception", rank), ""});
}

}  // namespace isomer
