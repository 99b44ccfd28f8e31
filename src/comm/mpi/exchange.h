// One call under way between processes: its messages, and the waiting for them.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi/world.h"
#include "comm/transport.h"

namespace isomer {

/// Opens every message.
struct MpiHeader {
  std::uint64_t sequence = 0;  // collectives of the group so far
  std::int64_t bytes = 0;      // of the payload
  double ready_s = 0;
  double ready_wall_s = 0;
  std::int32_t collective = 0;
  std::int32_t dtype = 0;
  std::int32_t phase = 0;
  std::int32_t control = 0;
  char tensor[80] = {};
};
/// Payloads up to this size travel in one message with the header.
inline constexpr std::int64_t kMpiInlineBytes = 4096;

class MpiExchange {
 public:
  MpiExchange(MpiWorld& world, const Call& call, int group_id, std::uint64_t sequence);
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  // Peers are world ranks. Header and payload go under `header_tag` and the tag after it.
  void send(int peer, const Block& block, MpiTag header_tag);
  void receive(int peer, const Block& block, MpiTag header_tag);
  /// The receiver of a pairwise message says when it was ready.
  void expect_ack(int peer);

  /// Waits for all of it. Throws isomer::Error.
  Latest finish();

 private:
  enum class Step { header, payload, ack };
  struct Incoming {
    int peer;
    Step step;
    MpiTag tag;
    Block block;
    std::vector<std::byte> message;  // header and small payload
    std::vector<std::byte> staging;  // a large payload for a strided block
    std::int64_t chunks_left = 0;
  };
  struct Message {
    std::vector<std::byte> bytes;
  };

  int tag_of(MpiTag tag) const { return group_id_ * kNumMpiTags + static_cast<int>(tag); }
  MpiHeader header(std::int64_t bytes) const;
  void post_send(const void* data, std::int64_t bytes, int peer, MpiTag tag);
  void post_receive(void* data, std::int64_t bytes, std::size_t incoming, MpiTag tag);
  void arrived(std::size_t incoming);
  void header_arrived(std::size_t incoming);
  void check(const MpiHeader& header, const Incoming& incoming) const;
  /// Throws if a peer has failed, left or stalled.
  void look_after_peers(StallWatch& watch);
  [[noreturn]] void give_up(const std::string& reason) const;

  MpiWorld& world_;
  const Call& call_;
  int group_id_;
  std::uint64_t sequence_;
  Latest latest_;
  std::vector<std::unique_ptr<Message>> outgoing_;  // what MPI still reads
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::vector<MPI_Request> requests_;
  std::vector<int> peer_of_;                 // by request
  std::vector<std::ptrdiff_t> incoming_of_;  // by request; −1: a send
  std::size_t num_open_ = 0;
};

}  // namespace isomer
