// Multi-head latent attention of one rank, in four stages that schemes compose: project, up-project, attention core
// (attention_core.h), output. Each has a forward and a backward; there is no tape. Notation as in the checkpoints:
// D = hidden_size, h = heads, n = qk_nope_head_dim, r = qk_rope_head_dim, d = kv_lora_rank, v = v_head_dim; T rows are
// the tokens a stage is given. A latent row is [ĉ | RoPE(k_pe)], d + r wide.
#pragma once

#include "layers/attention_layer.h"

namespace isomer {

struct ProjectSaved {
  Tensor x;        // [T, D]; its norm is applied anew in the backward
  Tensor rstd;     // [T]
  Tensor c_q;      // [T, q_lora_rank], before its norm (with q_lora_rank)
  Tensor c_q_hat;  // [T, q_lora_rank], after it
  Tensor rstd_q;   // [T]
  Tensor c;        // [T, d], before kv_a_layernorm (where there is one)
  Tensor rstd_kv;  // [T]
};
struct Projected {
  Tensor q;       // [T, h, n + r], rope applied; workspace
  Tensor latent;  // [T, d + r]; saved
};
/// RMSNorm, then queries and latent rows of the tokens in x [T, D].
Projected project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& x, ProjectSaved& saved);
/// dq [T, h, n + r], dlatent [T, d + r] (float32 or the activations' dtype, overwritten), dy [T, D] the residual's
/// gradient. Returns dx [T, D]; fills the gradients of everything before the up-projection.
Tensor project_backward(RankContext& ctx, const AttentionLayer& layer, ProjectSaved&& saved, Tensor dq, Tensor dlatent,
                        Tensor dy, BlockGradients& gradients);

/// [k_nope | v] of `heads` for latent rows [T, ≥ d]: [T, heads.count, n + v], of the given class.
Tensor up_project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& latent, IndexRange heads,
                          MemoryClass memory_class);
/// From dkv [T, heads.count, n + v]: dĉ into dlatent[:, :d] (float32, overwritten), and the gradient of kv_b_proj's
/// rows; with `accumulate` that is added to what zero_up_projection_gradient made.
void up_project_backward(RankContext& ctx, const AttentionLayer& layer, const Tensor& latent, IndexRange heads,
                         const Tensor& dkv, const Tensor& dlatent, BlockGradients& gradients, bool accumulate = false);

/// y = x + s·(attention·W_oᵀ (+ bias)), s = config.residual_scale(); attention [T, h, v], x and y [T, D]. This stage serves
/// grouped-query attention too, whose v is head_dim.
Tensor output_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& attention, const Tensor& x);
/// Returns the attention's gradient [T, h, v] and fills W_o's. The residual's gradient is dy itself.
Tensor output_backward(RankContext& ctx, const AttentionLayer& layer, Tensor attention, const Tensor& dy,
                       BlockGradients& gradients);

/// W_UK [heads, n, d] and W_UV [heads, v, d]: strided views of kv_b_proj's rows, or of its gradient's.
struct UpProjectionViews {
  Tensor w_uk, w_uv;
};
UpProjectionViews up_projection_views(const ModelConfig& config, const Tensor& kv_b_proj, IndexRange heads);
/// A gradient tensor for the up-projections of `heads`, [heads.count·(n + v), d], registered in `gradients`.
Tensor make_up_projection_gradient(RankContext& ctx, const AttentionLayer& layer, IndexRange heads,
                                   BlockGradients& gradients);
/// The same, filled with zeros.
void zero_up_projection_gradient(RankContext& ctx, const AttentionLayer& layer, IndexRange heads,
                                 BlockGradients& gradients);

}  // namespace isomer
