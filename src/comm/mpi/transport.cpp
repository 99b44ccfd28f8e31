#include "comm/mpi/transport.h"

#include <algorithm>

#include "comm/mpi/exchange.h"
#include "comm/run_rank.h"

namespace isomer {

MpiTransport::MpiTransport(const TransportOptions& options, std::shared_ptr<MpiWorld> world, std::vector<int> members,
                           int id)
    : Transport(options), world_(std::move(world)), members_(std::move(members)), id_(id) {
  const auto self = std::find(members_.begin(), members_.end(), world_->rank());
  rank_ = static_cast<int>(self - members_.begin());
}

Latest MpiTransport::exchange(const Call& call) {
  own_call_slot().begin_call(describe(call));
  const auto failure = world_->failure_reason();
  if (!failure.empty()) throw Error(call_error(world_->rank(), call, failure));
  if (call.control && call.tensor == kEndOfRun) world_->leave();
  auto messages = std::make_unique<MpiExchange>(*world_, call, id_, call.pairwise ? 0 : ++num_collectives_);
  Latest latest;
  try {
    post(*messages, call);
    latest = messages->finish();
  } catch (const std::exception& error) {
    // The library may still write to these buffers, so they stay; the world is about to end.
    world_->fail(error.what());
    (void)messages.release();
    throw;
  }
  // Clocks of other machines have another origin; what has happened was not ready in the future.
  latest.ready_wall_s = std::clamp(latest.ready_wall_s, call.ready_wall_s, std::max(call.ready_wall_s, wall_clock_s()));
  own_call_slot().end_call();
  world_->completed();
  return latest;
}

void MpiTransport::post(MpiExchange& messages, const Call& call) const {
  if (call.pairwise) {
    if (call.source >= 0) messages.receive(world_rank(call.source), call.receive[0], MpiTag::pair_header);
    if (call.destination >= 0) {
      messages.expect_ack(world_rank(call.destination));
      messages.send(world_rank(call.destination), call.send[0], MpiTag::pair_header);
    }
    return;
  }
  for (int step = 1; step < size(); ++step) {
    const int from = (rank_ + size() - step) % size();
    messages.receive(world_rank(from), call.receive[static_cast<std::size_t>(from)], MpiTag::header);
  }
  for (int step = 1; step < size(); ++step) {
    const int to = (rank_ + step) % size();
    messages.send(world_rank(to), call.send[static_cast<std::size_t>(to)], MpiTag::header);
  }
  const auto self = static_cast<std::size_t>(rank_);
  if (!call.drop) copy_block(call.send[self], call.receive[self]);
}

void MpiTransport::idle() {
  if (world_->failure_reason().empty()) world_->exchange_signs();
}

std::shared_ptr<Transport> MpiTransport::subgroup(const std::vector<int>& members, int id) {
  std::vector<int> world_ranks;
  for (int member : members) world_ranks.push_back(world_rank(member));
  return std::make_shared<MpiTransport>(options(), world_, std::move(world_ranks), id);
}

}  // namespace isomer
