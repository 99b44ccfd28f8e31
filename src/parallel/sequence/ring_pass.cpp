#include "parallel/sequence/ring_pass.h"

#include "kernels/elementwise.h"

namespace isomer {

namespace {

/// Steps and neighbours of one rank.
struct Ring {
  Ring(RankContext& context, const SequenceBlock& sequence_block, const RingBlock& mine)
      : ctx(context), block(sequence_block), own(mine), size(block.groups.outer->size()), rank(block.group()) {}

  /// The group whose block is here at `step`.
  int group_at(int step) const { return ((rank - step) % size + size) % size; }

  Shape shape_of(std::size_t i, int group) const {
    Shape shape = own.tensors[i].shape();
    shape[0] = block.tokens.group_rows(group);
    return shape;
  }

  std::string name(std::size_t i, bool sum) const { return sum ? fmt::format("d {} sum", own.names[i]) : own.names[i]; }

  std::vector<Tensor> buffers(int group, bool sum) const {
    std::vector<Tensor> result;
    for (std::size_t i = 0; i < own.tensors.size(); ++i) {
      const DType dtype = own.tensors[i].dtype();
      result.push_back(ctx.empty(fmt::format("{} received", name(i, sum)), MemoryClass::communication,
                                 sum ? statistic_dtype(dtype) : dtype, shape_of(i, group)));
    }
    return result;
  }

  std::vector<Tensor> zero_sums(int group) const {
    std::vector<Tensor> result;
    for (std::size_t i = 0; i < own.tensors.size(); ++i) {
      result.push_back(ctx.zeros(name(i, true), MemoryClass::communication, statistic_dtype(own.tensors[i].dtype()),
                                 shape_of(i, group)));
    }
    return result;
  }

  /// To the successor, and from the predecessor what it sends in turn.
  std::vector<Work> issue(const std::vector<Tensor>& send, const std::vector<Tensor>& receive, bool sum) const {
    std::vector<Work> works;
    for (std::size_t i = 0; i < send.size(); ++i) {
      works.push_back(block.groups.outer->issue_send_receive(name(i, sum), send[i], (rank + 1) % size, receive[i],
                                                             (rank + size - 1) % size));
    }
    return works;
  }

  RankContext& ctx;
  const SequenceBlock& block;
  const RingBlock& own;
  int size, rank;
};

void wait_all(std::vector<Work>& works) {
  for (Work& work : works) work.wait();
  works.clear();
}

}  // namespace

void pass_round(RankContext& ctx, const SequenceBlock& block, const RingBlock& mine, const RingVisit& visit) {
  const Ring ring(ctx, block, mine);
  std::vector<Tensor> here = mine.tensors, next;
  std::vector<Work> under_way;
  for (int step = 0; step < ring.size; ++step) {
    if (step + 1 < ring.size) {
      next = ring.buffers(ring.group_at(step + 1), false);
      under_way = ring.issue(here, next, false);
    }
    visit(here, ring.group_at(step));
    wait_all(under_way);
    here = std::move(next);
    next.clear();
  }
}

std::vector<Tensor> pass_round_backward(RankContext& ctx, const SequenceBlock& block, const RingBlock& mine,
                                        const RingContribution& contribute) {
  const Ring ring(ctx, block, mine);
  std::vector<Tensor> here = mine.tensors, next, sums;  // `sums`: from the predecessor, for the block that comes next
  std::vector<Work> blocks_under_way, sums_under_way;
  const auto send_on = [&](int next_step) {
    next = ring.buffers(ring.group_at(next_step), false);
    blocks_under_way = ring.issue(here, next, false);
  };
  /// This rank's share, with the sum that has come this far before it.
  const auto add_share = [&](const std::vector<Tensor>& tensors, int group) {
    std::vector<Tensor> share = ring.zero_sums(group);
    contribute(tensors, group, share);
    wait_all(sums_under_way);
    for (std::size_t i = 0; i < sums.size(); ++i) add(ctx, "add ring sum", sums[i], share[i], share[i]);
    sums.clear();
    return share;
  };
  if (ring.size > 1) send_on(1);
  for (int step = 1; step < ring.size; ++step) {
    wait_all(blocks_under_way);
    here = std::move(next);
    next.clear();
    if (step + 1 < ring.size) send_on(step + 1);
    const std::vector<Tensor> share = add_share(here, ring.group_at(step));
    sums = ring.buffers(ring.group_at(step + 1), true);
    sums_under_way = ring.issue(share, sums, true);
  }
  here.clear();
  return add_share(mine.tensors, ring.rank);
}

}  // namespace isomer
