// Sums of the parameter gradients over the ranks; a phase of its own in the ledger.
#include "comm/communicator.h"
#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

/// Sums the rank's heads' rows over those who hold the same, then gathers every inner rank's rows into the whole.
void join_up_projection_gradient(RankContext& ctx, const SequenceBlock& block, BlockGradients& gradients) {
  const Tensor mine = gradients.tensors.kv_b_proj;
  if (block.groups.same_heads->size() > 1) block.groups.same_heads->all_reduce("kv_b_proj", mine);
  const AttentionLayer& layer = block.layer;
  const std::int64_t rows = layer.weights.kv_b_proj.size(0);
  const Tensor whole = ctx.empty("d kv_b_proj", MemoryClass::gradient, mine.dtype(), {rows, mine.size(1)});
  std::vector<Tensor> receive;
  for (int peer = 0; peer < block.groups.inner->size(); ++peer) {
    const IndexRange heads = block.head_shards().heads(peer);
    const std::int64_t per_head = rows / layer.heads();
    receive.push_back(whole.slice(0, heads.begin * per_head, heads.count * per_head));
  }
  block.groups.inner->all_gather("kv_b_proj", mine, receive);
  gradients.tensors.kv_b_proj = whole;
  gradients.kv_b_heads = {0, layer.heads()};
}

}  // namespace

void sync_gradients(RankContext& ctx, const SequenceBlock& block, BlockGradients& gradients) {
  const PhaseScope phase(ctx, Phase::gradient_sync);
  if (ctx.comm().size() == 1) return;
  const bool own_heads_only = gradients.tensors.kv_b_proj && gradients.kv_b_heads.count != block.layer.heads();
  gradients.tensors.for_each([&](std::string_view name, Tensor& gradient) {
    if (&gradient == &gradients.tensors.kv_b_proj && own_heads_only) return;
    ctx.comm().all_reduce(name, gradient);
  });
  if (own_heads_only) join_up_projection_gradient(ctx, block, gradients);
}

}  // namespace isomer
