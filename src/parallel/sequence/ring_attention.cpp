#include "parallel/sequence/ring_attention.h"

#include "kernels/elementwise.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/partial_attention.h"
#include "parallel/sequence/ring_pass.h"

namespace isomer {

namespace {

bool is_ring(const SequenceBlock& block) { return block.tokens.num_groups > 1; }

PlacedKeys keys_of(const SequenceBlock& block, const std::vector<Tensor>& kv, int group) {
  return {.k = kv[0], .v = kv[1], .k_rope = {}, .positions = block.tokens.group_positions(group)};
}

PlacedQueries queries_of(const SequenceBlock& block, const Tensor& q) {
  return {.q = q, .q_rope = {}, .positions = block.tokens.group_positions(block.group())};
}

GroupGradients ring_backward(RankContext& ctx, const SequenceBlock& block, const Tensor& q, const Tensor& k,
                             const Tensor& v, CoreSaved&& taken, const Tensor& dout) {
  CoreSaved core = std::move(taken);
  Tensor dq = ctx.zeros("dq sum", MemoryClass::workspace, statistic_dtype(q.dtype()), q.shape());
  const auto sums = pass_round_backward(
      ctx, block, {{"k", "v"}, {k, v}}, [&](const std::vector<Tensor>& kv, int group, const std::vector<Tensor>& dkv) {
        attention_part_backward(ctx, block, queries_of(block, q), keys_of(block, kv, group), core, dout,
                                {.dq = dq, .dq_rope = {}, .dk = dkv[0], .dv = dkv[1], .dk_rope = {}});
      });
  core = {};
  return {rounded(ctx, "dq", dq, q.dtype()), sums[0], sums[1]};
}

}  // namespace

Tensor group_attention_forward(RankContext& ctx, const SequenceBlock& block, const Tensor& q, const Tensor& k,
                               const Tensor& v, CoreSaved& saved) {
  if (!is_ring(block)) return attention_core_forward(ctx, block.core, whole_sequence_inputs(block, q, k, v), saved);
  MergedAttention merged(ctx, block, queries_of(block, q));
  pass_round(ctx, block, {{"k", "v"}, {k, v}},
             [&](const std::vector<Tensor>& kv, int group) { merged.add(keys_of(block, kv, group)); });
  saved = merged.finish();
  return saved.out;
}

GroupGradients group_attention_backward(RankContext& ctx, const SequenceBlock& block, const Tensor& q, const Tensor& k,
                                        const Tensor& v, CoreSaved&& saved, const Tensor& dout) {
  if (is_dropped(saved)) group_attention_forward(ctx, block, q, k, v, saved);
  if (is_ring(block)) return ring_backward(ctx, block, q, k, v, std::move(saved), dout);
  GroupGradients g{.dq = ctx.empty("dq", MemoryClass::workspace, q.dtype(), q.shape()),
                   .dk = ctx.empty("dk", MemoryClass::workspace, q.dtype(), k.shape()),
                   .dv = ctx.empty("dv", MemoryClass::workspace, q.dtype(), v.shape())};
  attention_core_backward(ctx, block.core, whole_sequence_inputs(block, q, k, v), std::move(saved), dout,
                          {.dq = g.dq, .dk = g.dk, .dv = g.dv});
  return g;
}

void drop_core(CoreSaved& saved, const Tensor& out) {
  saved = {};
  out.reclassify(MemoryClass::workspace);
}

bool is_dropped(const CoreSaved& saved) { return !saved.out && saved.probabilities.empty(); }

}  // namespace isomer
