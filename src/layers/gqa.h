// Grouped-query attention of one rank, in the stages that schemes compose: project, attention core, output. Notation:
// D = hidden_size, h query heads, k KV heads, w = head_dim; T rows are the tokens a stage is given.
#pragma once

#include "layers/attention_layer.h"

namespace isomer {

struct GqaProjectSaved {
  Tensor x;     // [T, D]; its norm is applied anew in the backward
  Tensor rstd;  // [T]
};
struct GqaProjected {
  Tensor q;  // [T, h, w], rope applied; workspace
  Tensor k;  // [T, k, w], rope applied; workspace
  Tensor v;  // [T, k, w]; workspace
};
/// RMSNorm, then queries, keys and values of the tokens in x [T, D].
GqaProjected gqa_project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& x,
                                 GqaProjectSaved& saved);
/// dq [T, h, w], dk and dv [T, k, w] (x's dtype or float32, overwritten), dy [T, D] the residual's gradient. Returns dx
/// [T, D] and fills the gradients of everything before the core.
Tensor gqa_project_backward(RankContext& ctx, const AttentionLayer& layer, GqaProjectSaved&& saved, Tensor dq,
                            Tensor dk, Tensor dv, Tensor dy, BlockGradients& gradients);

}  // namespace isomer
