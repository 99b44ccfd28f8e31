#include "comm/communicator.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "comm/communication_thread.h"
#include "comm/ordered_sum.h"
#include "comm/transport.h"

namespace isomer {

namespace {

/// What all communicators of one rank share.
struct RankLine {
  std::unique_ptr<CommunicationThread> thread;  // none in a dry run
  bool drop = false;
  int next_group_id = 1;
};

std::vector<Block> empty_blocks(int count) { return std::vector<Block>(static_cast<std::size_t>(count)); }

/// Share `index` of `count` elements cut in `parts`, the first ones an element longer: {begin, length}.
std::pair<std::int64_t, std::int64_t> near_equal_share(std::int64_t count, int parts, int index) {
  const std::int64_t base = count / parts;
  const std::int64_t longer = count % parts;
  return {index * base + std::min<std::int64_t>(index, longer), base + (index < longer ? 1 : 0)};
}

std::vector<Tensor> joined(std::span<const Tensor> a, std::span<const Tensor> b) {
  std::vector<Tensor> all(a.begin(), a.end());
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

}  // namespace

struct Work::State {
  RankContext& ctx;
  std::shared_ptr<Request> request;  // null in a dry run, and where the rank is alone
  std::vector<Tensor> tensors;
  int exceptions_at_issue = std::uncaught_exceptions();
};

Work& Work::operator=(Work&& other) noexcept {
  if (this == &other) return *this;
  Work before(std::move(state_));
  state_ = std::move(other.state_);
  return *this;
}

Work::~Work() {
  if (!state_) return;
  // While the rank unwinds, its peers may never join this call.
  if (state_->request && std::uncaught_exceptions() > state_->exceptions_at_issue)
    state_->request->transport().abandon();
  try {
    wait();
  } catch (const std::exception&) {  // the next call of this rank meets the same error
  }
}

void Work::wait() {
  if (!state_) return;
  const auto state = std::move(state_);  // its tensors are released here, by the rank's own thread
  if (!state->request) return;
  const double begin_s = wall_clock_s();
  const double completion_s = state->request->wait();
  state->ctx.ops().enter_wait(wall_clock_s() - begin_s);
  state->ctx.heartbeat().fetch_add(1, std::memory_order_relaxed);
  state->ctx.clock().wait_until(completion_s);
}

struct Communicator::Impl {
  RankContext& ctx;
  std::shared_ptr<Transport> transport;
  std::shared_ptr<RankLine> line;

  int rank() const { return transport->rank(); }
  int size() const { return transport->size(); }
  /// The world is this rank, so nobody could fail it, and a way through the thread would cost more than small calls do.
  bool is_alone() const { return ctx.world_size() == 1; }

  template <class... Args>
  [[noreturn]] void refuse(const Call& call, fmt::format_string<Args...> format, Args&&... args) const {
    invalid_argument("{}", call_error(ctx.rank(), call, fmt::format(format, std::forward<Args>(args)...)));
  }

  Call make_call(Collective collective, std::string_view tensor, DType dtype) const {
    Call call;
    call.collective = collective;
    call.tensor = tensor;
    call.phase = ctx.phase();
    call.dtype = dtype;
    call.drop = line->drop;
    return call;
  }

  Block block(const Call& call, const Tensor& tensor, std::string_view role, int index) const {
    if (!tensor) refuse(call, "{}[{}] is an undefined tensor; give one with a size of 0", role, index);
    if (tensor.dtype() != call.dtype)
      refuse(call, "{}[{}] is {}, expected {}", role, index, name_of(tensor.dtype()), name_of(call.dtype));
    const auto result = block_of(tensor, ctx.dry_run());
    if (!result)
      refuse(call, "{}[{}] of shape {} and strides {} is no stack of equal rows at one or two strides", role, index,
             to_string(tensor.shape()), to_string(tensor.strides()));
    return *result;
  }

  std::vector<Block> blocks(const Call& call, std::span<const Tensor> tensors, std::string_view role) const {
    if (std::ssize(tensors) != size()) refuse(call, "{} {} tensors for a group of {}", tensors.size(), role, size());
    std::vector<Block> result;
    result.reserve(tensors.size());
    for (int peer = 0; peer < size(); ++peer)
      result.push_back(block(call, tensors[static_cast<std::size_t>(peer)], role, peer));
    return result;
  }

  void check_own(const Call& call) const {
    const auto self = static_cast<std::size_t>(rank());
    if (call.send[self].bytes() != call.receive[self].bytes())
      refuse(call, "send[{}] has {} bytes, receive[{}] {}", self, call.send[self].bytes(), self,
             call.receive[self].bytes());
  }

  void check_peer(const Call& call, int peer) const {
    if (peer < 0 || peer >= size() || peer == rank())
      refuse(call, "peer {} of rank {} in a group of {}: must be another rank", peer, rank(), size());
  }

  std::int64_t num_messages(const Call& call) const {
    std::int64_t count = 0;
    for (std::size_t peer = 0; peer < call.send.size(); ++peer) {
      const bool to_other = call.pairwise || static_cast<int>(peer) != rank();
      count += to_other && call.send[peer].bytes() > 0 ? 1 : 0;
    }
    return count;
  }

  /// One ledger entry for the calls that make one collective.
  void enter(std::initializer_list<const Call*> calls) const {
    const Call& first = **calls.begin();
    LedgerEntry entry{first.collective, first.tensor, first.phase, size(), 0, 0, 0};
    for (const Call* call : calls) {
      entry.bytes_sent += call->bytes_to_others(rank());
      entry.bytes_received += call->bytes_from_others(rank());
      entry.messages += num_messages(*call);
    }
    ctx.ledger().enter(std::move(entry));
  }

  Work issue(Call call, std::vector<Tensor> tensors) const {
    ctx.heartbeat().fetch_add(1, std::memory_order_relaxed);
    call.ready_s = ctx.clock().now_s();
    call.ready_wall_s = wall_clock_s();
    auto state = std::make_shared<Work::State>(Work::State{ctx, nullptr, std::move(tensors)});
    if (is_alone() && !call.control) {
      if (!ctx.dry_run() && !call.drop) copy_block(call.send[0], call.receive[0]);
    } else if (!ctx.dry_run()) {
      state->request = std::make_shared<Request>(std::move(call), transport);
      line->thread->submit(state->request);
    }
    return Work(std::move(state));
  }

  Work enter_and_issue(Call call, std::vector<Tensor> tensors) const {
    enter({&call});
    return issue(std::move(call), std::move(tensors));
  }

  /// A control call: real in a dry run too, where the rank's own thread makes it.
  void control(std::string_view name, std::vector<Block> send, std::vector<Block> receive) const {
    Call call = make_call(Collective::all_gather, name, DType::f64);
    call.control = true;
    call.drop = false;
    call.send = std::move(send);
    call.receive = std::move(receive);
    if (ctx.dry_run()) {
      transport->exchange(call);
    } else {
      issue(std::move(call), {}).wait();
    }
  }

  template <class T>
  std::vector<T> gather_values(std::string_view name, T mine) const {
    std::vector<T> all(static_cast<std::size_t>(size()));
    std::vector<Block> receive;
    for (T& value : all) receive.push_back(contiguous_block(&value, sizeof(T)));
    control(name, std::vector<Block>(all.size(), contiguous_block(&mine, sizeof(T))), std::move(receive));
    return all;
  }

  /// out = the sum over the group, of which the shares of others lie in `staged`.
  void sum(const Call& call, const Block& own, const std::vector<Block>& staged, const Block& out) const {
    std::vector<Block> sources = staged;
    sources[static_cast<std::size_t>(rank())] = own;
    ordered_sum(ctx, call.dtype, sources, out);
  }

  /// Room for what the others send of a share of `count` elements.
  struct Staging {
    Tensor tensor;
    std::vector<Block> blocks;  // [group size]; this rank's own is empty
  };
  Staging stage(const Call& call, std::int64_t count) const {
    Staging staging{ctx.empty(call.tensor + " staging", MemoryClass::communication, call.dtype, {size() - 1, count}),
                    empty_blocks(size())};
    if (call.drop && !ctx.dry_run() && staging.tensor.numel() > 0)
      std::fill_n(static_cast<std::byte*>(staging.tensor.raw()), staging.tensor.nbytes(), std::byte{0});
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Tensor part = staging.tensor.select(0, peer < rank() ? peer : peer - 1);
      staging.blocks[static_cast<std::size_t>(peer)] = block(call, part, "staging", peer);
    }
    return staging;
  }
};

Communicator::Communicator(RankContext& ctx, std::shared_ptr<Transport> transport) {
  auto line = std::make_shared<RankLine>();
  if (!ctx.dry_run()) line->thread = std::make_unique<CommunicationThread>(transport);
  impl_ = std::make_unique<Impl>(Impl{ctx, std::move(transport), std::move(line)});
}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Communicator::~Communicator() = default;

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }

Work Communicator::issue_all_to_all(std::string_view tensor, std::span<const Tensor> send,
                                    std::span<const Tensor> receive) {
  Call call = impl_->make_call(Collective::all_to_all, tensor, send.empty() ? DType::f32 : send[0].dtype());
  call.send = impl_->blocks(call, send, "send");
  call.receive = impl_->blocks(call, receive, "receive");
  impl_->check_own(call);
  // Dry there is no data to keep alive, and large groups make many calls.
  return impl_->enter_and_issue(std::move(call), impl_->ctx.dry_run() ? std::vector<Tensor>() : joined(send, receive));
}

Work Communicator::issue_all_gather(std::string_view tensor, const Tensor& mine, std::span<const Tensor> receive) {
  Call call = impl_->make_call(Collective::all_gather, tensor, mine.dtype());
  call.send.assign(static_cast<std::size_t>(size()), impl_->block(call, mine, "mine", rank()));
  call.receive = impl_->blocks(call, receive, "receive");
  impl_->check_own(call);
  return impl_->enter_and_issue(std::move(call), joined({&mine, 1}, receive));
}

Work Communicator::issue_send_receive(std::string_view tensor, const Tensor& send, int destination,
                                      const Tensor& receive, int source) {
  Call call = impl_->make_call(Collective::send_receive, tensor, send.dtype());
  call.pairwise = true;
  impl_->check_peer(call, call.destination = destination);
  impl_->check_peer(call, call.source = source);
  call.send = {impl_->block(call, send, "send", 0)};
  call.receive = {impl_->block(call, receive, "receive", 0)};
  return impl_->enter_and_issue(std::move(call), {send, receive});
}

Work Communicator::issue_send(std::string_view tensor, const Tensor& send, int destination) {
  Call call = impl_->make_call(Collective::send_receive, tensor, send.dtype());
  call.pairwise = true;
  impl_->check_peer(call, call.destination = destination);
  call.send = {impl_->block(call, send, "send", 0)};
  return impl_->enter_and_issue(std::move(call), {send});
}

Work Communicator::issue_receive(std::string_view tensor, const Tensor& receive, int source) {
  Call call = impl_->make_call(Collective::send_receive, tensor, receive.dtype());
  call.pairwise = true;
  impl_->check_peer(call, call.source = source);
  call.receive = {impl_->block(call, receive, "receive", 0)};
  return impl_->enter_and_issue(std::move(call), {receive});
}

void Communicator::all_to_all(std::string_view tensor, std::span<const Tensor> send, std::span<const Tensor> receive) {
  issue_all_to_all(tensor, send, receive).wait();
}

void Communicator::all_gather(std::string_view tensor, const Tensor& mine, std::span<const Tensor> receive) {
  issue_all_gather(tensor, mine, receive).wait();
}

void Communicator::reduce_scatter(std::string_view tensor, std::span<const Tensor> send, const Tensor& out) {
  Call call = impl_->make_call(Collective::reduce_scatter, tensor, out.dtype());
  call.send = impl_->blocks(call, send, "send");
  const Block out_block = impl_->block(call, out, "out", rank());
  const Block own = std::exchange(call.send[static_cast<std::size_t>(rank())], Block{});
  if (own.bytes() != out_block.bytes())
    impl_->refuse(call, "send[{}] has {} bytes, out {}", rank(), own.bytes(), out_block.bytes());
  auto staging = impl_->stage(call, out.numel());
  call.receive = staging.blocks;
  impl_->enter({&call});
  impl_->issue(call, joined(send, {&staging.tensor, 1})).wait();
  impl_->sum(call, own, staging.blocks, out_block);
}

void Communicator::all_reduce(std::string_view tensor, const Tensor& inout) {
  Call scatter = impl_->make_call(Collective::all_reduce, tensor, inout.dtype());
  const Block whole = impl_->block(scatter, inout, "inout", rank());
  if (!whole.contiguous())
    impl_->refuse(scatter, "shape {} with strides {} is not contiguous", to_string(inout.shape()),
                  to_string(inout.strides()));
  const std::int64_t width = size_of(inout.dtype());
  std::vector<Block> shares;
  for (int peer = 0; peer < size(); ++peer) {
    const auto [begin, length] = near_equal_share(inout.numel(), size(), peer);
    shares.push_back(length == 0 ? Block{} : Block{nullptr, 1, length * width, length * width});
    if (length > 0 && whole.data != nullptr) shares.back().data = whole.data + begin * width;
  }
  const auto self = static_cast<std::size_t>(rank());
  const Block own = shares[self];
  auto staging = impl_->stage(scatter, own.bytes() / width);
  scatter.send = shares;
  scatter.send[self] = {};
  scatter.receive = staging.blocks;
  Call gather = impl_->make_call(Collective::all_reduce, tensor, inout.dtype());
  gather.send.assign(shares.size(), own);
  gather.receive = shares;
  impl_->enter({&scatter, &gather});

  impl_->issue(scatter, {inout, staging.tensor}).wait();
  impl_->sum(scatter, own, staging.blocks, own);
  staging.tensor = Tensor();
  impl_->issue(std::move(gather), {inout}).wait();
}

void Communicator::broadcast(std::string_view tensor, const Tensor& inout, int root) {
  Call call = impl_->make_call(Collective::broadcast, tensor, inout.dtype());
  if (root < 0 || root >= size()) impl_->refuse(call, "root {} in a group of {}", root, size());
  const Block block = impl_->block(call, inout, "inout", rank());
  call.send = empty_blocks(size());
  call.receive = empty_blocks(size());
  if (rank() == root) {
    std::fill(call.send.begin(), call.send.end(), block);
    call.send[static_cast<std::size_t>(root)] = {};
  } else {
    call.receive[static_cast<std::size_t>(root)] = block;
  }
  impl_->enter_and_issue(std::move(call), {inout}).wait();
}

void Communicator::barrier() {
  Call call = impl_->make_call(Collective::barrier, "", DType::f32);
  call.send = empty_blocks(size());
  call.receive = empty_blocks(size());
  impl_->enter_and_issue(std::move(call), {}).wait();
}

double Communicator::max_over_ranks(double value) {
  const auto all = impl_->gather_values("max_over_ranks", value);
  return *std::max_element(all.begin(), all.end());
}

std::vector<std::string> Communicator::gather_text(const std::string& text) {
  const auto sizes = impl_->gather_values("gather_text", static_cast<std::int64_t>(text.size()));
  std::vector<std::string> texts;
  auto send = empty_blocks(size());
  auto receive = empty_blocks(size());
  std::string mine = text;
  send[0] = contiguous_block(mine.data(), std::ssize(mine));
  if (rank() == 0) {
    for (const auto bytes : sizes) texts.emplace_back(static_cast<std::size_t>(bytes), '\0');
    for (std::size_t peer = 0; peer < texts.size(); ++peer)
      receive[peer] = contiguous_block(texts[peer].data(), sizes[peer]);
  }
  impl_->control("gather_text", std::move(send), std::move(receive));
  return texts;
}

void Communicator::end_run() { impl_->control(kEndOfRun, empty_blocks(size()), empty_blocks(size())); }

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  using Place = std::array<int, 3>;  // colour, key, the next free group id
  const auto places = impl_->gather_values("split", Place{color, key, impl_->line->next_group_id});
  std::vector<std::pair<int, int>> order;  // (key, rank)
  int id = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const auto& [peer_color, peer_key, next_id] = places[static_cast<std::size_t>(peer)];
    if (peer_color == color) order.emplace_back(peer_key, peer);
    id = std::max(id, next_id);
  }
  impl_->line->next_group_id = id + 1;
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  for (const auto& [_, peer] : order) members.push_back(peer);
  auto impl = std::make_unique<Impl>(Impl{impl_->ctx, impl_->transport->subgroup(members, id), impl_->line});
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

void Communicator::drop_transfers(bool drop) { impl_->line->drop = drop; }

}  // namespace isomer
