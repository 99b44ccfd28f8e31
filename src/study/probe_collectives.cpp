// The collectives between the ranks of this machine, timed over sizes.
#include <algorithm>

#include "comm/communicator.h"
#include "comm/group.h"
#include "core/error.h"
#include "study/probe.h"

namespace isomer {

namespace {

constexpr int kBatches = 7;

/// Buffers of one rank for a message of `bytes` (the convention of `Operation::bytes`).
struct Buffers {
  Tensor whole;              // [bytes / 4] f32
  std::vector<Tensor> send;  // its equal shares
  Tensor received;
  std::vector<Tensor> receive;
};

Buffers buffers_for(std::int64_t bytes, int ranks) {
  const std::int64_t share = std::max<std::int64_t>(1, bytes / 4 / ranks);
  Buffers b;
  b.whole = Tensor::unrecorded("probe", DType::f32, {share * ranks});
  b.received = Tensor::unrecorded("probe", DType::f32, {share * ranks});
  std::fill_n(b.whole.data<float>(), b.whole.numel(), 1.0f);
  std::fill_n(b.received.data<float>(), b.received.numel(), 0.0f);
  for (int r = 0; r < ranks; ++r) {
    b.send.push_back(b.whole.slice(0, r * share, share));
    b.receive.push_back(b.received.slice(0, r * share, share));
  }
  return b;
}

void call(Communicator& comm, OperationKind kind, const Buffers& b) {
  const auto mine = static_cast<std::size_t>(comm.rank());
  const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
  switch (kind) {
    case OperationKind::all_reduce: return comm.all_reduce("probe", b.received);
    case OperationKind::all_gather: return comm.all_gather("probe", b.send[mine], b.receive);
    case OperationKind::reduce_scatter: return comm.reduce_scatter("probe", b.send, b.receive[mine]);
    case OperationKind::all_to_all: return comm.all_to_all("probe", b.send, b.receive);
    default: return comm.issue_send_receive("probe", b.whole, next, b.received, previous).wait();
  }
}

/// Wall seconds of one call at the slowest rank, of the second fastest batch: on a shared machine the work of others
/// only ever adds.
double seconds_per_call(RankContext& ctx, OperationKind kind, const Buffers& b, double budget_s) {
  Communicator& comm = ctx.comm();
  call(comm, kind, b);
  comm.barrier();
  double begin_s = wall_clock_s();
  call(comm, kind, b);
  const double once_s = comm.max_over_ranks(wall_clock_s() - begin_s);
  const int calls = std::clamp(static_cast<int>(budget_s / kBatches / std::max(once_s, 1e-7)), 1, 200);
  std::vector<double> seconds;
  for (int batch = 0; batch < kBatches; ++batch) {
    comm.barrier();
    begin_s = wall_clock_s();
    for (int i = 0; i < calls; ++i) call(comm, kind, b);
    seconds.push_back((wall_clock_s() - begin_s) / calls);
  }
  std::nth_element(seconds.begin(), seconds.begin() + 1, seconds.end());
  return comm.max_over_ranks(seconds[1]);
}

}  // namespace

void sample_collectives(const ProbeOptions& options, SampleFamilies& families) {
  GroupOptions group;
  group.num_ranks = options.num_ranks;
  group.threads_per_rank = options.threads_per_rank;
  run_group(group, [&](RankContext& ctx) {
    for (int kind = static_cast<int>(OperationKind::all_reduce); kind <= static_cast<int>(OperationKind::send_receive);
         ++kind) {
      const auto which = static_cast<OperationKind>(kind);
      for (std::int64_t bytes = 1 << 10; bytes <= 1 << 24; bytes *= 2) {
        const Buffers b = buffers_for(bytes, options.num_ranks);
        if (ctx.rank() == 0) options.progress(fmt::format("timing {}", name_of(which)));
        const double seconds = seconds_per_call(ctx, which, b, options.seconds_per_shape);
        if (ctx.rank() != 0) continue;
        Operation op{.kind = which, .bytes = static_cast<double>(b.whole.nbytes()), .devices = options.num_ranks};
        op.compute = op.storage = Precision::f32;
        add_sample(families, {.kind = which, .compute = Precision::f32, .storage = Precision::f32}, std::move(op),
                   std::max(seconds, 1e-8));
      }
    }
  });
}

}  // namespace isomer
