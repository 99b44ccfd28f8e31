#include "parallel/sequence/groups.h"

namespace isomer {

namespace {

/// The ranks of equal colour; the world itself, unsplit, where that is all of them.
std::shared_ptr<Communicator> group_of(RankContext& ctx, int color, int size) {
  if (size == ctx.comm().size()) return {std::shared_ptr<void>(), &ctx.comm()};  // owned by ctx
  return ctx.comm().split(color, ctx.rank());
}

}  // namespace

SequenceGroups make_sequence_groups(RankContext& ctx, const Layout& layout) {
  const SequenceLayout l = sequence_layout(layout, ctx.world_size());
  const int replica = ctx.rank() / l.sequence_ranks();
  const int in_sequence = ctx.rank() % l.sequence_ranks();
  const int index = in_sequence % l.inner_ranks;
  SequenceGroups groups{.data_rank = replica, .data_size = l.data_replicas};
  groups.sequence = group_of(ctx, replica, l.sequence_ranks());
  groups.inner = group_of(ctx, ctx.rank() / l.inner_ranks, l.inner_ranks);
  groups.outer = group_of(ctx, replica * l.inner_ranks + index, l.outer_groups);
  groups.same_heads = l.data_replicas == 1 ? groups.outer : group_of(ctx, index, l.outer_groups * l.data_replicas);
  return groups;
}

}  // namespace isomer
