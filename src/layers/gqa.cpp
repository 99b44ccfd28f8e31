#include "layers/gqa.h"

#include <utility>

#include "kernels/matmul.h"
#include "layers/projection.h"

namespace isomer {

namespace {

/// One of the three projections: a Linear whose output is heads.
struct HeadProjection {
  std::string_view name;  // "q_proj"
  const Tensor& weight;   // [heads·w, D]
  const Tensor& bias;     // [heads·w], or undefined
};

/// [T, heads, w].
Tensor project_heads(RankContext& ctx, const HeadProjection& p, const Tensor& x_norm, std::int64_t head_dim) {
  const std::int64_t rows = x_norm.size(0), width = p.weight.size(0);
  const Tensor heads = ctx.empty(p.name.substr(0, 1), MemoryClass::workspace, x_norm.dtype(), {rows, width});
  matmul(ctx, p.name, x_norm, p.weight.transpose(0, 1), heads);
  if (p.bias) add_bias(ctx, fmt::format("{} bias", p.name), p.bias, heads);
  return heads.reshape({rows, width / head_dim, head_dim});
}

/// Products take operands of one type: a float32 gradient of bfloat16 activations is rounded once, here.
Tensor rounded(RankContext& ctx, std::string_view name, Tensor gradient, DType dtype) {
  if (gradient.dtype() == dtype) return gradient;
  Tensor narrow = ctx.empty(name, MemoryClass::workspace, dtype, gradient.shape());
  copy(ctx, "round", gradient, narrow);
  return narrow;
}

/// Fills the gradients of weight and bias; writes dx_norm, or adds to it.
void heads_backward(RankContext& ctx, const HeadProjection& p, Tensor dheads, const Tensor& x_norm,
                    const Tensor& dx_norm, bool accumulate, std::pair<Tensor&, Tensor&> gradients) {
  const std::string name(p.name);
  const Tensor dy = rounded(ctx, "d " + name + " output", std::move(dheads), x_norm.dtype()).flatten(1, 2);
  if (p.bias) gradients.second = bias_gradient(ctx, "d " + name + " bias", dy);
  gradients.first = weight_gradient(ctx, "d " + name, dy, x_norm);
  matmul(ctx, "dx " + name, dy, p.weight, dx_norm, accumulate);
}

Tensor input_norm(RankContext& ctx, const AttentionLayer& layer, std::string_view name, const Tensor& x,
                  const Tensor& rstd) {
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  rms_norm_forward(ctx, name, x, layer.weights.input_layernorm, layer.config.rms_norm_eps, x_norm, rstd);
  return x_norm;
}

}  // namespace

GqaProjected gqa_project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& x,
                                 GqaProjectSaved& saved) {
  const auto& [config, w, rope] = layer;
  FunctionScope scope(ctx);
  saved.x = x;
  saved.rstd = row_statistics(ctx, "rstd input", MemoryClass::saved, x);
  Tensor x_norm = input_norm(ctx, layer, "input_layernorm", x, saved.rstd);
  GqaProjected out;
  out.q = project_heads(ctx, {"q_proj", w.q_proj, w.q_bias}, x_norm, config.head_dim);
  out.k = project_heads(ctx, {"k_proj", w.k_proj, w.k_bias}, x_norm, config.head_dim);
  out.v = project_heads(ctx, {"v_proj", w.v_proj, w.v_bias}, x_norm, config.head_dim);
  scope.release(std::move(x_norm));
  apply_rope(ctx, "rope q", out.q, rope, RopeDirection::forward);
  apply_rope(ctx, "rope k", out.k, rope, RopeDirection::forward);
  ctx.observe("q", out.q);
  ctx.observe("k", out.k);
  ctx.observe("v", out.v);
  return out;
}

Tensor gqa_project_backward(RankContext& ctx, const AttentionLayer& layer, GqaProjectSaved&& taken, Tensor dq,
                            Tensor dk, Tensor dv, Tensor dy, BlockGradients& gradients) {
  const GqaProjectSaved saved = std::move(taken);
  const auto& [config, w, rope] = layer;
  AttentionWeights& g = gradients.tensors;
  Tensor rstd_again = row_statistics(ctx, "rstd input again", MemoryClass::workspace, saved.x);
  Tensor x_norm = input_norm(ctx, layer, "input_layernorm again", saved.x, rstd_again);
  rstd_again = Tensor();
  Tensor dx_norm = ctx.empty("d x normed", MemoryClass::workspace, statistic_dtype(saved.x.dtype()), saved.x.shape());
  apply_rope(ctx, "rope dq", dq, rope, RopeDirection::inverse);
  heads_backward(ctx, {"q_proj", w.q_proj, w.q_bias}, std::move(dq), x_norm, dx_norm, false, {g.q_proj, g.q_bias});
  apply_rope(ctx, "rope dk", dk, rope, RopeDirection::inverse);
  heads_backward(ctx, {"k_proj", w.k_proj, w.k_bias}, std::move(dk), x_norm, dx_norm, true, {g.k_proj, g.k_bias});
  heads_backward(ctx, {"v_proj", w.v_proj, w.v_bias}, std::move(dv), x_norm, dx_norm, true, {g.v_proj, g.v_bias});
  x_norm = Tensor();
  g.input_layernorm = norm_gradient(ctx, "d input_layernorm", w.input_layernorm);
  Tensor dx = ctx.empty("dx", MemoryClass::workspace, saved.x.dtype(), saved.x.shape());
  rms_norm_backward(ctx, "input_layernorm backward",
                    {.x = saved.x,
                     .rstd = saved.rstd,
                     .weight = w.input_layernorm,
                     .dy = dx_norm,
                     .residual = std::move(dy),
                     .dx = dx,
                     .dweight = g.input_layernorm});
  return dx;
}

}  // namespace isomer
