#include "parallel/sequence/exchange.h"

#include "comm/communicator.h"
#include "kernels/elementwise.h"

namespace isomer {

namespace {

/// A framework's all-to-all takes contiguous buffers only; the lean path sends the strided view itself.
Tensor as_sent(RankContext& ctx, FunctionScope& scope, std::string_view name, const Tensor& view) {
  if (ctx.memory_policy() == MemoryPolicy::lean || view.is_contiguous()) return view;
  Tensor packed = ctx.empty(fmt::format("{} packed", name), MemoryClass::communication, view.dtype(), view.shape());
  copy(ctx, "pack", view, packed);
  Tensor kept = packed;
  scope.release(std::move(kept));
  return packed;
}

/// Rows of an inner rank in the group's gathered rows.
IndexRange rows_of(const SequenceBlock& block, int inner_rank) {
  return block.tokens.rows_in_group(inner_rank, block.group());
}

/// With one rank a tensor stays where it is, and serves as what would have been received.
Tensor kept(const Tensor& tensor, MemoryClass memory_class) {
  tensor.reclassify(memory_class);
  return tensor;
}

}  // namespace

Tensor views_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                      const std::vector<Tensor>& to_rank, MemoryClass memory_class) {
  const int ranks = block.groups.inner->size();
  if (ranks == 1) return kept(to_rank.front(), memory_class);
  FunctionScope scope(ctx);
  const Tensor& first = to_rank.front();
  const Tensor result =
      ctx.empty(name, memory_class, first.dtype(), {block.group_rows(), first.size(1), first.size(2)});
  std::vector<Tensor> send, receive;
  for (int peer = 0; peer < ranks; ++peer) {
    const IndexRange rows = rows_of(block, peer);
    send.push_back(as_sent(ctx, scope, name, to_rank[static_cast<std::size_t>(peer)]));
    receive.push_back(result.slice(0, rows.begin, rows.count));
  }
  block.groups.inner->all_to_all(name, send, receive);
  ctx.observe(fmt::format("{} by heads", name), result);
  return result;
}

Tensor tokens_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                       MemoryClass memory_class) {
  const HeadShards heads{local.size(1), block.groups.inner->size()};
  std::vector<Tensor> to_rank;
  for (int peer = 0; peer < heads.num_ranks; ++peer) {
    const IndexRange theirs = heads.heads(peer);
    to_rank.push_back(local.slice(1, theirs.begin, theirs.count));
  }
  return views_to_heads(ctx, block, name, to_rank, memory_class);
}

Tensor heads_to_tokens(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& by_heads,
                       MemoryClass memory_class) {
  const int ranks = block.groups.inner->size();
  if (ranks == 1) return kept(by_heads, memory_class);
  FunctionScope scope(ctx);
  const HeadShards heads{by_heads.size(1) * ranks, ranks};
  const IndexRange mine = rows_of(block, block.inner_rank());
  const Tensor result =
      ctx.empty(name, memory_class, by_heads.dtype(), {mine.count, heads.num_heads, by_heads.size(2)});
  std::vector<Tensor> send, receive;
  for (int peer = 0; peer < ranks; ++peer) {
    const IndexRange rows = rows_of(block, peer), theirs = heads.heads(peer);
    send.push_back(as_sent(ctx, scope, name, by_heads.slice(0, rows.begin, rows.count)));
    receive.push_back(result.slice(1, theirs.begin, theirs.count));
  }
  block.groups.inner->all_to_all(name, send, receive);
  ctx.observe(name, result);
  return result;
}

Tensor gather_rows(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                   MemoryClass memory_class) {
  const int ranks = block.groups.inner->size();
  if (ranks == 1) return kept(local, memory_class);
  const Tensor result = ctx.empty(name, memory_class, local.dtype(), {block.group_rows(), local.size(1)});
  std::vector<Tensor> receive;
  for (int peer = 0; peer < ranks; ++peer) {
    const IndexRange rows = rows_of(block, peer);
    receive.push_back(result.slice(0, rows.begin, rows.count));
  }
  block.groups.inner->all_gather(name, local, receive);
  ctx.observe(fmt::format("{} gathered", name), result);
  return result;
}

Tensor scatter_sum_rows(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& partial) {
  const int ranks = block.groups.inner->size();
  if (ranks == 1) return partial;
  const IndexRange mine = rows_of(block, block.inner_rank());
  const Tensor result = ctx.empty(name, MemoryClass::workspace, partial.dtype(), {mine.count, partial.size(1)});
  std::vector<Tensor> send;
  for (int peer = 0; peer < ranks; ++peer) {
    const IndexRange rows = rows_of(block, peer);
    send.push_back(partial.slice(0, rows.begin, rows.count));
  }
  block.groups.inner->reduce_scatter(name, send, result);
  ctx.observe(name, result);
  return result;
}

IndexRange rows_of_group(const SequenceBlock& block, int group) {
  IndexRange rows{0, block.tokens.group_rows(group)};
  for (int before = 0; before < group; ++before) rows.begin += block.tokens.group_rows(before);
  return rows;
}

GatheredRows issue_gather_over_groups(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                                      const Tensor& local, MemoryClass memory_class) {
  const int groups = block.groups.outer->size();
  if (groups == 1) return {kept(local, memory_class), {}};
  const Tensor result = ctx.empty(name, memory_class, local.dtype(), {block.tokens.total_rows(), local.size(1)});
  std::vector<Tensor> receive;
  for (int group = 0; group < groups; ++group) {
    const IndexRange rows = rows_of_group(block, group);
    receive.push_back(result.slice(0, rows.begin, rows.count));
  }
  return {result, block.groups.outer->issue_all_gather(name, local, receive)};
}

Tensor scatter_sum_over_groups(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                               const Tensor& partial) {
  const int groups = block.groups.outer->size();
  if (groups == 1) return partial;
  const Tensor result = ctx.empty(name, MemoryClass::workspace, partial.dtype(), {block.group_rows(), partial.size(1)});
  std::vector<Tensor> send;
  for (int group = 0; group < groups; ++group) {
    const IndexRange rows = rows_of_group(block, group);
    send.push_back(partial.slice(0, rows.begin, rows.count));
  }
  block.groups.outer->reduce_scatter(name, send, result);
  ctx.observe(name, result);
  return result;
}

}  // namespace isomer
