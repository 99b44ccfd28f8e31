// The transport of a rank that is a process under MPI. Each message begins with a header that says which call it
// belongs to, when its sender was ready and how much comes; small payloads ride along with it.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mpi/world.h"
#include "comm/transport.h"

namespace isomer {

class MpiExchange;

class MpiTransport : public Transport {
 public:
  MpiTransport(const TransportOptions& options, std::shared_ptr<MpiWorld> world, std::vector<int> members, int id);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  int world_rank(int group_rank) const override { return members_[static_cast<std::size_t>(group_rank)]; }
  Latest exchange(const Call& call) override;
  std::shared_ptr<Transport> subgroup(const std::vector<int>& members, int id) override;
  void abandon() override { world_->abandon(); }
  void idle() override;
  double idle_interval_s() const override { return world_->interval_s(); }

 private:
  void post(MpiExchange& messages, const Call& call) const;

  std::shared_ptr<MpiWorld> world_;
  std::vector<int> members_;  // world ranks
  int id_;
  int rank_ = 0;
  std::uint64_t num_collectives_ = 0;
};

}  // namespace isomer
