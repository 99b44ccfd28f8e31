// Sums of the parameter gradients over the ranks; a phase of its own in the ledger.
#include "comm/communicator.h"
#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

/// Rows of every rank's heads, gathered into the whole gradient.
void gather_up_projection_gradient(RankContext& ctx, const AttentionLayer& layer, BlockGradients& gradients) {
  const Tensor mine = gradients.tensors.kv_b_proj;
  const std::int64_t rows = layer.weights.kv_b_proj.size(0);
  const Tensor whole = ctx.empty("d kv_b_proj", MemoryClass::gradient, mine.dtype(), {rows, mine.size(1)});
  const HeadShards shards{layer.heads(), ctx.comm().size()};
  std::vector<Tensor> receive;
  for (int peer = 0; peer < ctx.comm().size(); ++peer) {
    const IndexRange heads = shards.heads(peer);
    const std::int64_t per_head = rows / layer.heads();
    receive.push_back(whole.slice(0, heads.begin * per_head, heads.count * per_head));
  }
  ctx.comm().all_gather("kv_b_proj", mine, receive);
  gradients.tensors.kv_b_proj = whole;
  gradients.kv_b_heads = {0, layer.heads()};
}

}  // namespace

void sync_gradients(RankContext& ctx, const AttentionLayer& layer, BlockGradients& gradients) {
  const PhaseScope phase(ctx, Phase::gradient_sync);
  if (ctx.comm().size() == 1) return;
  const bool own_heads_only = gradients.kv_b_heads.count != layer.heads();
  gradients.tensors.for_each([&](std::string_view name, Tensor& gradient) {
    if (&gradient == &gradients.tensors.kv_b_proj && own_heads_only) return;
    ctx.comm().all_reduce(name, gradient);
  });
  if (own_heads_only) gather_up_projection_gradient(ctx, layer, gradients);
}

}  // namespace isomer
