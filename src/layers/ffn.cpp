#include "layers/ffn.h"

#include <utility>

#include "kernels/ffn_ops.h"
#include "layers/ffn_parts.h"
#include "layers/gradients.h"

namespace isomer {

namespace {

std::string named(std::string_view prefix, std::string_view name) { return fmt::format("{}{}", prefix, name); }

Tensor norm_again(RankContext& ctx, const FfnLayer& layer, const FfnSaved& saved) {
  const Tensor& x = saved.x;
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  const Tensor rstd =
      ctx.empty("rstd post_attention again", MemoryClass::workspace, statistic_dtype(x.dtype()), {x.size(0)});
  rms_norm_forward(ctx, "post_attention_layernorm again", x, layer.weights.post_attention_layernorm,
                   layer.config.rms_norm_eps, x_norm, rstd);
  return x_norm;
}

/// The gradient of the branch, which counts residual_scale() times.
Tensor branch_gradient(RankContext& ctx, const ModelConfig& config, const Tensor& dy) {
  if (config.residual_scale() == 1) return dy;
  Tensor scaled = ctx.empty("d branch", MemoryClass::workspace, dy.dtype(), dy.shape());
  scaled_sum(ctx, "d branch", dy, Tensor(), config.residual_scale(), scaled);
  return scaled;
}

}  // namespace

Tensor swiglu_forward(RankContext& ctx, std::string_view prefix, const MlpWeights& w, const Tensor& x_norm,
                      Tensor& gate, Tensor& up) {
  FunctionScope scope(ctx);
  const DType dtype = x_norm.dtype();
  const std::int64_t rows = x_norm.size(0), width = w.gate_proj.size(0);
  gate = ctx.empty(named(prefix, "gate"), MemoryClass::saved, dtype, {rows, width});
  matmul(ctx, named(prefix, "gate_proj"), x_norm, w.gate_proj.transpose(0, 1), gate);
  up = ctx.empty(named(prefix, "up"), MemoryClass::saved, dtype, {rows, width});
  matmul(ctx, named(prefix, "up_proj"), x_norm, w.up_proj.transpose(0, 1), up);
  Tensor activation = ctx.empty(named(prefix, "activation"), MemoryClass::workspace, dtype, {rows, width});
  silu_mul(ctx, named(prefix, "silu"), gate, up, activation);
  Tensor y = ctx.empty(named(prefix, "mlp output"), MemoryClass::workspace, dtype, x_norm.shape());
  matmul(ctx, named(prefix, "down_proj"), activation, w.down_proj.transpose(0, 1), y);
  scope.release(std::move(activation));
  return y;
}

void swiglu_backward(RankContext& ctx, std::string_view prefix, const MlpWeights& w, SwigluBackward a,
                     MlpWeights& gradients) {
  const DType dtype = a.x_norm.dtype();
  Tensor activation = ctx.empty(named(prefix, "activation"), MemoryClass::workspace, dtype, a.gate.shape());
  silu_mul(ctx, named(prefix, "silu again"), a.gate, a.up, activation);
  add_weight_gradient(ctx, named(prefix, "d down_proj"), a.dy, activation, gradients.down_proj);
  // The activation's own gradient takes its place.
  const Tensor dactivation = std::move(activation);
  matmul(ctx, named(prefix, "dx down_proj"), a.dy, w.down_proj, dactivation);
  silu_mul_backward(ctx, named(prefix, "silu backward"), a.gate, a.up, dactivation, a.gate, a.up);
  add_weight_gradient(ctx, named(prefix, "d gate_proj"), a.gate, a.x_norm, gradients.gate_proj);
  add_weight_gradient(ctx, named(prefix, "d up_proj"), a.up, a.x_norm, gradients.up_proj);
  matmul(ctx, named(prefix, "dx gate_proj"), a.gate, w.gate_proj, a.dx_norm, a.accumulate);
  matmul(ctx, named(prefix, "dx up_proj"), a.up, w.up_proj, a.dx_norm, true);
}

Tensor ffn_forward(RankContext& ctx, const FfnLayer& layer, const Tensor& x, const RoutingSource& routing,
                   FfnSaved& saved) {
  FunctionScope scope(ctx);
  const auto& [config, weights] = layer;
  saved.x = x;
  saved.rstd = ctx.empty("rstd post_attention", MemoryClass::saved, statistic_dtype(x.dtype()), {x.size(0)});
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  rms_norm_forward(ctx, "post_attention_layernorm", x, weights.post_attention_layernorm, config.rms_norm_eps, x_norm,
                   saved.rstd);
  const bool scaled = config.residual_scale() != 1;
  Tensor y = weights.is_moe() ? moe_forward(ctx, layer, x_norm, scaled ? Tensor() : x, routing, saved)
                              : swiglu_forward(ctx, "", weights.mlp, x_norm, saved.gate, saved.up);
  scope.release(std::move(x_norm));
  if (scaled) scaled_sum(ctx, "residual scale", y, Tensor(), config.residual_scale(), y);
  if (scaled || !weights.is_moe()) add(ctx, "residual", y, x, y);
  return y;
}

Tensor ffn_backward(RankContext& ctx, const FfnLayer& layer, FfnSaved&& taken, Tensor dy, FfnGradients& gradients) {
  FfnSaved saved = std::move(taken);
  const auto& [config, weights] = layer;
  const Tensor x = saved.x, rstd = saved.rstd;
  Tensor x_norm = norm_again(ctx, layer, saved);
  Tensor dbranch = branch_gradient(ctx, config, dy);
  Tensor dx_norm;
  if (weights.is_moe()) {
    dx_norm = moe_backward(ctx, layer, x_norm, std::move(saved), dbranch, gradients);
  } else {
    dx_norm = ctx.empty("d x normed", MemoryClass::workspace, statistic_dtype(x.dtype()), x.shape());
    swiglu_backward(ctx, "", weights.mlp,
                    {.x_norm = x_norm,
                     .gate = std::move(saved.gate),
                     .up = std::move(saved.up),
                     .dy = dbranch,
                     .dx_norm = dx_norm,
                     .accumulate = false},
                    gradients.mlp);
  }
  x_norm = dbranch = Tensor();
  Tensor dx = ctx.empty("dx", MemoryClass::workspace, x.dtype(), x.shape());
  add_norm_gradient(ctx, "post_attention_layernorm backward",
                    {.x = x,
                     .rstd = rstd,
                     .weight = weights.post_attention_layernorm,
                     .dy = dx_norm,
                     .residual = std::move(dy),
                     .dx = dx},
                    gradients.post_attention_layernorm);
  return dx;
}

}  // namespace isomer
