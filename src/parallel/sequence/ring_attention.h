// The attention between a rank's queries and keys, whatever the layout: over the whole sequence where there is one
// group, else over keys and values that pass round the outer groups (ring attention with zigzag order).
//
//   group g of G, tokens of parts g and 2G−1−g       its heads' K, V  ──▶ group g+1 ──▶ … (G − 1 hops)
//   step s: attention of own queries over the block of group g−s, as far as causality lets them see it; merge by LSE
//   backward: K, V pass round again, behind them float32 sums of dK, dV, home after G − 1 hops
#pragma once

#include "parallel/sequence/scheme.h"

namespace isomer {

/// q, k, v [rows of the group, heads, width], latent or grouped-query heads. Returns [rows, heads, value_width].
Tensor group_attention_forward(RankContext& ctx, const SequenceBlock& block, const Tensor& q, const Tensor& k,
                               const Tensor& v, CoreSaved& saved);

struct GroupGradients {
  Tensor dq;      // q's dtype
  Tensor dk, dv;  // q's dtype, or float32 sums where they passed round
};
/// What the core saved may have been dropped (drop_core); it is then computed again, blocks passing round once more.
GroupGradients group_attention_backward(RankContext& ctx, const SequenceBlock& block, const Tensor& q, const Tensor& k,
                                        const Tensor& v, CoreSaved&& saved, const Tensor& dout);

/// For recompute=attention: forgets what the core keeps; its output stays as long as somebody holds it.
void drop_core(CoreSaved& saved, const Tensor& out);
bool is_dropped(const CoreSaved& saved);

}  // namespace isomer
