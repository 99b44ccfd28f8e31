#include "kernels/elementwise.h"
#include "layers/ffn_parts.h"
#include "parallel/decode/stages.h"

namespace isomer {

Tensor ffn_part(RankContext& ctx, const DecodeBlock& block, const Tensor& x) {
  const LayerWeights& weights = block.model.explicit_part.weights.layers[static_cast<std::size_t>(block.index)];
  const ModelConfig& config = block.model.config;
  FfnSaved dropped;
  const Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  const Tensor rstd = ctx.empty("rstd post_attention", MemoryClass::workspace, statistic_dtype(x.dtype()), {x.size(0)});
  rms_norm_forward(ctx, "post_attention_layernorm", x, weights.post_attention_layernorm, config.rms_norm_eps, x_norm,
                   rstd);
  // Every rank has the same rows, so that all route alike; experts are cut by their width or stand on one rank,
  // and nobody adds x twice.
  return weights.is_moe() ? moe_forward(ctx, {config, weights}, x_norm, Tensor(), {}, dropped)
                          : swiglu_forward(ctx, "", weights.mlp, x_norm, dropped.gate, dropped.up);
}

Tensor decode_ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) {
  Tensor y = ffn_part(ctx, block, x);
  block.comm.all_reduce("ffn output", y);
  add_residual(ctx, block, y, x);
  return y;
}

}  // namespace isomer
