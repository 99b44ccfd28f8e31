#include "comm/mpi/exchange.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "comm/mpi/patience.h"
#include "comm/mpi/transport.h"

namespace isomer {

namespace {

// Far below the 2 GiB that a count of bytes can say, and small enough that progress shows.
constexpr std::int64_t kChunkBytes = std::int64_t{4} << 20;

Call call_of(const MpiHeader& header) {
  Call call;
  call.collective = static_cast<Collective>(header.collective);
  call.tensor = header.tensor;
  call.phase = static_cast<Phase>(header.phase);
  call.dtype = static_cast<DType>(header.dtype);
  call.control = header.control != 0;
  return call;
}

}  // namespace

MpiExchange::MpiExchange(MpiWorld& world, const Call& call, int group_id, std::uint64_t sequence)
    : world_(world), call_(call), group_id_(group_id), sequence_(sequence), latest_{call.ready_s, call.ready_wall_s} {}

MpiHeader MpiExchange::header(std::int64_t bytes) const {
  MpiHeader header;
  header.sequence = sequence_;
  header.bytes = bytes;
  header.ready_s = call_.ready_s;
  header.ready_wall_s = call_.ready_wall_s;
  header.collective = static_cast<std::int32_t>(call_.collective);
  header.dtype = static_cast<std::int32_t>(call_.dtype);
  header.phase = static_cast<std::int32_t>(call_.phase);
  header.control = call_.control ? 1 : 0;
  call_.tensor.copy(header.tensor, sizeof header.tensor - 1);
  return header;
}

void MpiExchange::post_send(const void* data, std::int64_t bytes, int peer, MpiTag tag) {
  const auto* from = static_cast<const std::byte*>(data);
  for (std::int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
    const auto length = static_cast<int>(std::min(kChunkBytes, bytes - begin));
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Isend(from + begin, length, MPI_BYTE, peer, tag_of(tag), world_.comm(), &request), "MPI_Isend");
    requests_.push_back(request);
    peer_of_.push_back(peer);
    incoming_of_.push_back(-1);
    ++num_open_;
  }
}

void MpiExchange::post_receive(void* data, std::int64_t bytes, std::size_t incoming, MpiTag tag) {
  auto* to = static_cast<std::byte*>(data);
  auto& entry = *incoming_[incoming];
  for (std::int64_t begin = 0; begin < bytes; begin += kChunkBytes) {
    const auto length = static_cast<int>(std::min(kChunkBytes, bytes - begin));
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Irecv(to + begin, length, MPI_BYTE, entry.peer, tag_of(tag), world_.comm(), &request), "MPI_Irecv");
    requests_.push_back(request);
    peer_of_.push_back(entry.peer);
    incoming_of_.push_back(static_cast<std::ptrdiff_t>(incoming));
    ++entry.chunks_left;
    ++num_open_;
  }
}

void MpiExchange::send(int peer, const Block& block, MpiTag header_tag) {
  const std::int64_t bytes = block.bytes();
  const bool rides_along = bytes <= kMpiInlineBytes;
  auto& message = outgoing_.emplace_back(std::make_unique<Message>())->bytes;
  message.resize(sizeof(MpiHeader) + static_cast<std::size_t>(rides_along ? bytes : 0));
  const MpiHeader opening = header(bytes);
  std::memcpy(message.data(), &opening, sizeof opening);
  if (rides_along) copy_block(block, contiguous_block(message.data() + sizeof opening, bytes));
  post_send(message.data(), std::ssize(message), peer, header_tag);
  if (rides_along) return;

  const auto data_tag = static_cast<MpiTag>(static_cast<int>(header_tag) + 1);
  if (block.contiguous()) {
    post_send(block.data, bytes, peer, data_tag);
    return;
  }
  auto& packed = outgoing_.emplace_back(std::make_unique<Message>())->bytes;
  packed.resize(static_cast<std::size_t>(bytes));
  copy_block(block, contiguous_block(packed.data(), bytes));
  post_send(packed.data(), bytes, peer, data_tag);
}

void MpiExchange::receive(int peer, const Block& block, MpiTag header_tag) {
  auto& entry = *incoming_.emplace_back(new Incoming{peer, Step::header, header_tag, block, {}, {}});
  entry.message.resize(sizeof(MpiHeader) + kMpiInlineBytes);
  post_receive(entry.message.data(), std::ssize(entry.message), incoming_.size() - 1, header_tag);
}

void MpiExchange::expect_ack(int peer) {
  auto& entry = *incoming_.emplace_back(new Incoming{peer, Step::ack, MpiTag::pair_ack, {}, {}, {}});
  entry.message.resize(sizeof(MpiHeader));
  post_receive(entry.message.data(), std::ssize(entry.message), incoming_.size() - 1, MpiTag::pair_ack);
}

void MpiExchange::check(const MpiHeader& header, const Incoming& incoming) const {
  const Call other = call_of(header);
  if (other.control && other.tensor == kEndOfRun && call_.tensor != kEndOfRun)
    give_up(fmt::format("rank {} left", incoming.peer));
  const std::string shown_tensor = call_.tensor.substr(0, sizeof header.tensor - 1);
  const bool same = other.collective == call_.collective && other.control == call_.control &&
                    other.dtype == call_.dtype && other.tensor == shown_tensor &&
                    (call_.pairwise || header.sequence == sequence_);
  if (!same) give_up(fmt::format("rank {} issued {} instead", incoming.peer, describe_with_type(other)));
  if (header.bytes != incoming.block.bytes())
    give_up(fmt::format("rank {} sends {} bytes, {} expected", incoming.peer, header.bytes, incoming.block.bytes()));
}

void MpiExchange::header_arrived(std::size_t index) {
  Incoming& incoming = *incoming_[index];
  MpiHeader header;
  std::memcpy(&header, incoming.message.data(), sizeof header);
  latest_ = later(latest_, {header.ready_s, header.ready_wall_s});
  if (incoming.step == Step::ack) return;
  check(header, incoming);
  if (incoming.tag == MpiTag::pair_header) {
    auto& ack = outgoing_.emplace_back(std::make_unique<Message>())->bytes;
    ack.resize(sizeof(MpiHeader));
    const MpiHeader mine = this->header(0);
    std::memcpy(ack.data(), &mine, sizeof mine);
    post_send(ack.data(), std::ssize(ack), incoming.peer, MpiTag::pair_ack);
  }
  if (header.bytes <= kMpiInlineBytes) {
    if (!call_.drop) {
      copy_block(contiguous_block(incoming.message.data() + sizeof header, header.bytes), incoming.block);
    }
    return;
  }
  incoming.step = Step::payload;
  const auto data_tag = static_cast<MpiTag>(static_cast<int>(incoming.tag) + 1);
  const bool direct = incoming.block.contiguous() && !call_.drop;
  if (!direct) incoming.staging.resize(static_cast<std::size_t>(header.bytes));
  post_receive(direct ? incoming.block.data : incoming.staging.data(), header.bytes, index, data_tag);
}

void MpiExchange::arrived(std::size_t index) {
  Incoming& incoming = *incoming_[index];
  if (--incoming.chunks_left > 0) return;
  if (incoming.step != Step::payload) {
    header_arrived(index);
  } else if (!incoming.staging.empty() && !call_.drop) {
    copy_block(contiguous_block(incoming.staging.data(), std::ssize(incoming.staging)), incoming.block);
  }
}

void MpiExchange::look_after_peers(StallWatch& watch) {
  world_.exchange_signs();
  std::set<int> missing;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] != MPI_REQUEST_NULL) missing.insert(peer_of_[i]);
  }
  for (int peer : missing) {
    const auto verdict = watch.verdict(peer);
    if (!verdict.empty()) give_up(verdict);
  }
}

void MpiExchange::give_up(const std::string& reason) const { throw Error(call_error(world_.rank(), call_, reason)); }

Latest MpiExchange::finish() {
  StallWatch watch(world_);
  Patience patience(world_.size(), std::min(0.05, world_.interval_s()));
  std::vector<int> done;
  world_.begin_wait(call_);
  while (num_open_ > 0) {
    done.resize(requests_.size());
    int num_done = 0;
    check_mpi(
        MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &num_done, done.data(), MPI_STATUSES_IGNORE),
        "MPI_Testsome");
    if (num_done <= 0) {
      if (patience.pause()) look_after_peers(watch);
      continue;
    }
    patience.reset();
    world_.exchange_signs();
    num_open_ -= static_cast<std::size_t>(num_done);
    for (int i = 0; i < num_done; ++i) {
      const auto incoming = incoming_of_[static_cast<std::size_t>(done[static_cast<std::size_t>(i)])];
      if (incoming >= 0) arrived(static_cast<std::size_t>(incoming));
    }
  }
  world_.end_wait();
  return latest_;
}

}  // namespace isomer
