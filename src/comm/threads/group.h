// Ranks of one process that meet in calls: each shows its blocks, and receivers copy straight from the sender's memory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads/world.h"
#include "comm/transport.h"

namespace isomer {

/// Shared by the members of one group.
class ThreadsGroup {
 public:
  /// `world` must outlive the group.
  ThreadsGroup(World& world, std::vector<int> members);

  const std::vector<int>& members() const { return members_; }
  World& world() { return world_; }

  Latest collective(int rank, const Call& call);
  Latest pairwise(int rank, const Call& call);

 private:
  /// A send that stands in the receiver's queue until the receiver takes it.
  struct Message {
    const Call* call;
    bool taken = false;
    bool done = false;
    Latest receiver;
  };
  using Lock = std::unique_lock<std::mutex>;

  int world_rank(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  /// Ends the run for everybody and throws.
  [[noreturn]] void give_up(int rank, const Call& call, const std::string& reason);
  /// Waits until `missing()`, the group ranks that are waited for, is empty; gives up by the watch's verdict on them.
  template <class Missing>
  void wait(Lock& lock, int rank, const Call& call, const Missing& missing);
  void wake_all();

  void arrive(int rank, const Call& call);
  std::string copy_from_all(int rank, const Call& call) const;
  void depart(int rank);

  /// Before a throw: a peer must not find the message, or must have read it.
  void withdraw(Lock& lock, int rank, int destination, Message& message);
  Latest receive(Lock& lock, int rank, const Call& call);

  World& world_;
  std::vector<int> members_;
  std::mutex mutex_;
  std::vector<std::condition_variable> changed_;  // one a rank
  std::vector<const Call*> posted_;               // this round's calls by rank
  int num_arrived_ = 0;
  int num_done_ = 0;
  std::uint64_t opened_ = 0;  // rounds in which all arrived
  std::uint64_t closed_ = 0;  // rounds in which all have copied
  bool broken_ = false;
  std::map<std::pair<int, int>, std::deque<Message*>> channels_;  // (source, destination)
};

/// One rank's end of a group.
class ThreadsTransport : public Transport {
 public:
  ThreadsTransport(const TransportOptions& options, std::shared_ptr<ThreadsGroup> group, int rank)
      : Transport(options), group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->members().size()); }
  int world_rank(int group_rank) const override { return group_->members()[static_cast<std::size_t>(group_rank)]; }
  Latest exchange(const Call& call) override;
  std::shared_ptr<Transport> subgroup(const std::vector<int>& members, int id) override;
  void abandon() override;
  World& world() { return group_->world(); }

 private:
  std::shared_ptr<ThreadsGroup> group_;
  int rank_;
};

}  // namespace isomer
