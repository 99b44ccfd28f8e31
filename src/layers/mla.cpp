#include "layers/mla.h"

#include <cstring>
#include <utility>

#include "kernels/matmul.h"
#include "layers/projection.h"
#include "layers/rope.h"

namespace isomer {

namespace {

/// Columns [0, d) of latent rows, and the rope key's columns.
Tensor latent_part(const ModelConfig& config, const Tensor& latent) { return latent.slice(1, 0, config.kv_lora_rank); }
Tensor rope_part(const ModelConfig& config, const Tensor& latent) {
  return latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim);
}
/// The rope columns of queries [T, h, n + r].
Tensor query_rope_part(const ModelConfig& config, const Tensor& q) {
  return q.slice(2, config.qk_nope_head_dim, config.qk_rope_head_dim);
}
/// A rope key [T, r] as one head.
Tensor as_one_head(const Tensor& k_pe) { return k_pe.unflatten(1, {1, k_pe.size(1)}); }

Tensor project_queries(RankContext& ctx, const AttentionLayer& layer, const Tensor& x_norm, ProjectSaved& saved) {
  const auto& [config, w, rope] = layer;
  const DType dtype = x_norm.dtype();
  const std::int64_t rows = x_norm.size(0), width = layer.heads() * config.qk_head_dim();
  Tensor q = ctx.empty("q", MemoryClass::workspace, dtype, {rows, width});
  if (config.q_lora_rank > 0) {
    saved.c_q = ctx.empty("c_q", MemoryClass::saved, dtype, {rows, config.q_lora_rank});
    matmul(ctx, "q_a_proj", x_norm, w.q_a_proj.transpose(0, 1), saved.c_q);
    if (w.q_a_bias) add_bias(ctx, "q_a bias", w.q_a_bias, saved.c_q);
    saved.c_q_hat = ctx.empty("c_q normed", MemoryClass::saved, dtype, {rows, config.q_lora_rank});
    saved.rstd_q = row_statistics(ctx, "rstd q_a", MemoryClass::saved, x_norm);
    rms_norm_forward(ctx, "q_a_layernorm", saved.c_q, w.q_a_layernorm, ModelConfig::kInnerNormEps, saved.c_q_hat,
                     saved.rstd_q);
    matmul(ctx, "q_b_proj", saved.c_q_hat, w.q_b_proj.transpose(0, 1), q);
  } else {
    matmul(ctx, "q_proj", x_norm, w.q_proj.transpose(0, 1), q);
  }
  q = q.reshape({rows, layer.heads(), config.qk_head_dim()});
  apply_rope(ctx, "rope q", query_rope_part(config, q), rope, RopeDirection::forward);
  return q;
}

Tensor project_latent(RankContext& ctx, const AttentionLayer& layer, const Tensor& x_norm, ProjectSaved& saved) {
  const auto& [config, w, rope] = layer;
  const std::int64_t rows = x_norm.size(0), d = config.kv_lora_rank, r = config.qk_rope_head_dim;
  Tensor latent = ctx.empty("latent", MemoryClass::saved, x_norm.dtype(), {rows, d + r});
  // Two products, so that neither c nor the rope key is a strided part of something larger that would have to stay.
  Tensor c = latent_part(config, latent);
  if (config.kv_a_layernorm) c = saved.c = ctx.empty("c", MemoryClass::saved, x_norm.dtype(), {rows, d});
  const Tensor k_pe = rope_part(config, latent);
  matmul(ctx, "kv_a_proj latent", x_norm, w.kv_a_proj.slice(0, 0, d).transpose(0, 1), c);
  matmul(ctx, "kv_a_proj rope", x_norm, w.kv_a_proj.slice(0, d, r).transpose(0, 1), k_pe);
  if (w.kv_a_bias) {
    add_bias(ctx, "kv_a bias", w.kv_a_bias.slice(0, 0, d), c);
    add_bias(ctx, "kv_a bias", w.kv_a_bias.slice(0, d, r), k_pe);
  }
  ctx.observe("c", c);
  if (config.kv_a_layernorm) {
    saved.rstd_kv = row_statistics(ctx, "rstd kv_a", MemoryClass::saved, x_norm);
    rms_norm_forward(ctx, "kv_a_layernorm", c, w.kv_a_layernorm, ModelConfig::kInnerNormEps,
                     latent_part(config, latent), saved.rstd_kv);
  }
  apply_rope(ctx, "rope k", as_one_head(k_pe), rope, RopeDirection::forward);
  return latent;
}

/// Adds the queries' part to dx_norm.
void queries_backward(RankContext& ctx, const AttentionLayer& layer, const Tensor& x_norm, ProjectSaved& saved,
                      Tensor dq, const Tensor& dx_norm, BlockGradients& gradients) {
  const auto& [config, w, rope] = layer;
  apply_rope(ctx, "rope dq", query_rope_part(config, dq), rope, RopeDirection::inverse);
  const Tensor dq_rows = dq.flatten(1, 2);
  dq = Tensor();
  if (config.q_lora_rank == 0) {
    gradients.tensors.q_proj = weight_gradient(ctx, "d q_proj", dq_rows, x_norm);
    return matmul(ctx, "dx q_proj", dq_rows, w.q_proj, dx_norm);
  }
  gradients.tensors.q_b_proj = weight_gradient(ctx, "d q_b_proj", dq_rows, saved.c_q_hat);
  saved.c_q_hat = Tensor();
  Tensor dc_q = ctx.empty("d c_q", MemoryClass::workspace, x_norm.dtype(), saved.c_q.shape());
  matmul(ctx, "dx q_b_proj", dq_rows, w.q_b_proj, dc_q);
  gradients.tensors.q_a_layernorm = norm_gradient(ctx, "d q_a_layernorm", w.q_a_layernorm);
  rms_norm_backward(ctx, "q_a_layernorm backward",
                    {.x = saved.c_q,
                     .rstd = saved.rstd_q,
                     .weight = w.q_a_layernorm,
                     .dy = dc_q,
                     .dx = dc_q,
                     .dweight = gradients.tensors.q_a_layernorm});
  saved.c_q = saved.rstd_q = Tensor();
  if (w.q_a_bias) gradients.tensors.q_a_bias = bias_gradient(ctx, "d q_a bias", dc_q);
  gradients.tensors.q_a_proj = weight_gradient(ctx, "d q_a_proj", dc_q, x_norm);
  matmul(ctx, "dx q_a_proj", dc_q, w.q_a_proj, dx_norm);
}

/// [dc | dk_pe before rope] [T, d + r] in the activations' dtype.
Tensor latent_rows_backward(RankContext& ctx, const AttentionLayer& layer, ProjectSaved& saved, const Tensor& dlatent,
                            DType dtype, BlockGradients& gradients) {
  const auto& [config, w, rope] = layer;
  apply_rope(ctx, "rope dk", as_one_head(rope_part(config, dlatent)), rope, RopeDirection::inverse);
  Tensor dkv_a =
      dlatent.dtype() == dtype ? dlatent : ctx.empty("d kv_a", MemoryClass::workspace, dtype, dlatent.shape());
  if (config.kv_a_layernorm) {
    gradients.tensors.kv_a_layernorm = norm_gradient(ctx, "d kv_a_layernorm", w.kv_a_layernorm);
    rms_norm_backward(ctx, "kv_a_layernorm backward",
                      {.x = saved.c,
                       .rstd = saved.rstd_kv,
                       .weight = w.kv_a_layernorm,
                       .dy = latent_part(config, dlatent),
                       .dx = latent_part(config, dkv_a),
                       .dweight = gradients.tensors.kv_a_layernorm});
    saved.c = saved.rstd_kv = Tensor();
  } else if (dlatent.dtype() != dtype) {
    copy(ctx, "round dc", latent_part(config, dlatent), latent_part(config, dkv_a));
  }
  if (dlatent.dtype() != dtype) copy(ctx, "round dk_pe", rope_part(config, dlatent), rope_part(config, dkv_a));
  return dkv_a;
}

}  // namespace

RopeRows make_rope_rows(RankContext& ctx, const ModelConfig& config, DType dtype, std::int64_t first_position,
                        const std::vector<IndexRange>& ranges, std::int64_t rows_per_position,
                        std::int64_t max_position) {
  std::vector<std::int64_t> positions;
  for (const IndexRange& range : ranges) {
    for (std::int64_t p = range.begin; p < range.end(); ++p) positions.push_back(first_position + p);
  }
  const auto count = static_cast<std::int64_t>(positions.size());
  const std::int64_t pairs = config.rope_dim() / 2;
  const DType table_dtype = statistic_dtype(dtype);
  RopeRows rows{.cos = ctx.empty("rope cos", MemoryClass::weight, table_dtype, {count, pairs}),
                .sin = ctx.empty("rope sin", MemoryClass::weight, table_dtype, {count, pairs}),
                .rows_per_position = rows_per_position,
                .interleave = config.rope.interleave};
  if (ctx.dry_run() || pairs == 0) return rows;
  const RopeTable table = rope_table(config.rope, config.rope_dim(), positions, max_position);
  visit_dtype(table_dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bf16>) {
      std::copy(table.cos.begin(), table.cos.end(), rows.cos.data<T>());
      std::copy(table.sin.begin(), table.sin.end(), rows.sin.data<T>());
    }
  });
  return rows;
}

Projected project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& x, ProjectSaved& saved) {
  FunctionScope scope(ctx);
  saved.x = x;
  saved.rstd = row_statistics(ctx, "rstd input", MemoryClass::saved, x);
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  rms_norm_forward(ctx, "input_layernorm", x, layer.weights.input_layernorm, layer.config.rms_norm_eps, x_norm,
                   saved.rstd);
  Tensor q = project_queries(ctx, layer, x_norm, saved);
  Tensor latent = project_latent(ctx, layer, x_norm, saved);
  scope.release(std::move(x_norm));
  ctx.observe("q", q);
  ctx.observe("latent", latent);
  return {q, latent};
}

Tensor project_backward(RankContext& ctx, const AttentionLayer& layer, ProjectSaved&& taken, Tensor dq, Tensor dlatent,
                        Tensor dy, BlockGradients& gradients) {
  ProjectSaved saved = std::move(taken);
  const auto& [config, w, rope] = layer;
  const DType dtype = saved.x.dtype();
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, dtype, saved.x.shape());
  Tensor rstd_again = row_statistics(ctx, "rstd input again", MemoryClass::workspace, saved.x);
  rms_norm_forward(ctx, "input_layernorm again", saved.x, w.input_layernorm, config.rms_norm_eps, x_norm, rstd_again);
  rstd_again = Tensor();
  Tensor dx_norm = ctx.empty("d x normed", MemoryClass::workspace, statistic_dtype(dtype), saved.x.shape());
  queries_backward(ctx, layer, x_norm, saved, std::move(dq), dx_norm, gradients);
  Tensor dkv_a = latent_rows_backward(ctx, layer, saved, dlatent, dtype, gradients);
  dlatent = Tensor();
  gradients.tensors.kv_a_proj = weight_gradient(ctx, "d kv_a_proj", dkv_a, x_norm);
  x_norm = Tensor();
  if (w.kv_a_bias) gradients.tensors.kv_a_bias = bias_gradient(ctx, "d kv_a bias", dkv_a);
  matmul(ctx, "dx kv_a_proj", dkv_a, w.kv_a_proj, dx_norm, true);
  dkv_a = Tensor();
  gradients.tensors.input_layernorm = norm_gradient(ctx, "d input_layernorm", w.input_layernorm);
  Tensor dx = ctx.empty("dx", MemoryClass::workspace, dtype, saved.x.shape());
  rms_norm_backward(ctx, "input_layernorm backward",
                    {.x = saved.x,
                     .rstd = saved.rstd,
                     .weight = w.input_layernorm,
                     .dy = dx_norm,
                     .residual = std::move(dy),
                     .dx = dx,
                     .dweight = gradients.tensors.input_layernorm});
  return dx;
}

Tensor up_project_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& latent, IndexRange heads,
                          MemoryClass memory_class) {
  const std::int64_t width = layer.config.qk_nope_head_dim + layer.config.v_head_dim;
  Tensor kv = ctx.empty("kv_b output", memory_class, latent.dtype(), {latent.size(0), heads.count * width});
  const Tensor weight = layer.weights.kv_b_proj.slice(0, heads.begin * width, heads.count * width);
  matmul(ctx, "kv_b_proj", latent_part(layer.config, latent), weight.transpose(0, 1), kv);
  return kv.reshape({latent.size(0), heads.count, width});
}

Tensor make_up_projection_gradient(RankContext& ctx, const AttentionLayer& layer, IndexRange heads,
                                   BlockGradients& gradients) {
  const std::int64_t width = layer.config.qk_nope_head_dim + layer.config.v_head_dim;
  gradients.kv_b_heads = heads;
  gradients.tensors.kv_b_proj =
      ctx.empty("d kv_b_proj", MemoryClass::gradient, statistic_dtype(layer.weights.kv_b_proj.dtype()),
                {heads.count * width, layer.config.kv_lora_rank});
  return gradients.tensors.kv_b_proj;
}

void zero_up_projection_gradient(RankContext& ctx, const AttentionLayer& layer, IndexRange heads,
                                 BlockGradients& gradients) {
  const Tensor gradient = make_up_projection_gradient(ctx, layer, heads, gradients);
  if (!ctx.dry_run() && gradient.numel() > 0)
    std::memset(gradient.raw(), 0, static_cast<std::size_t>(gradient.nbytes()));
}

void up_project_backward(RankContext& ctx, const AttentionLayer& layer, const Tensor& latent, IndexRange heads,
                         const Tensor& dkv, const Tensor& dlatent, BlockGradients& gradients, bool accumulate) {
  const std::int64_t width = layer.config.qk_nope_head_dim + layer.config.v_head_dim;
  const Tensor dkv_rows = dkv.flatten(1, 2);
  const Tensor weight = layer.weights.kv_b_proj.slice(0, heads.begin * width, heads.count * width);
  matmul(ctx, "d kv_b_proj", dkv_rows.transpose(0, 1), latent_part(layer.config, latent),
         accumulate ? gradients.tensors.kv_b_proj : make_up_projection_gradient(ctx, layer, heads, gradients),
         accumulate);
  matmul(ctx, "dx kv_b_proj", dkv_rows, weight, latent_part(layer.config, dlatent));
}

Tensor output_forward(RankContext& ctx, const AttentionLayer& layer, const Tensor& attention, const Tensor& x) {
  Tensor y = ctx.empty("y", MemoryClass::workspace, x.dtype(), x.shape());
  matmul(ctx, "o_proj", attention.flatten(1, 2), layer.weights.o_proj.transpose(0, 1), y);
  if (layer.weights.o_bias) add_bias(ctx, "o bias", layer.weights.o_bias, y);
  const double scale = layer.config.residual_scale();
  if (scale != 1) scaled_sum(ctx, "residual scale", y, Tensor(), scale, y);
  add(ctx, "residual", y, x, y);
  return y;
}

Tensor output_backward(RankContext& ctx, const AttentionLayer& layer, Tensor attention, const Tensor& dresidual,
                       BlockGradients& gradients) {
  Tensor dy = dresidual;
  if (const double scale = layer.config.residual_scale(); scale != 1) {
    dy = ctx.empty("d branch", MemoryClass::workspace, dy.dtype(), dy.shape());
    scaled_sum(ctx, "d branch", dresidual, Tensor(), scale, dy);
  }
  gradients.tensors.o_proj = weight_gradient(ctx, "d o_proj", dy, attention.flatten(1, 2));
  attention = Tensor();
  if (layer.weights.o_bias) gradients.tensors.o_bias = bias_gradient(ctx, "d o bias", dy);
  const std::int64_t v = layer.config.value_head_dim();
  Tensor dattention = ctx.empty("d attention", MemoryClass::workspace, dy.dtype(), {dy.size(0), layer.heads() * v});
  matmul(ctx, "dx o_proj", dy, layer.weights.o_proj, dattention);
  return dattention.reshape({dy.size(0), layer.heads(), v});
}

UpProjectionViews up_projection_views(const ModelConfig& config, const Tensor& kv_b_proj, IndexRange heads) {
  const std::int64_t n = config.qk_nope_head_dim, v = config.v_head_dim;
  const Tensor rows =
      kv_b_proj.slice(0, heads.begin * (n + v), heads.count * (n + v)).unflatten(0, {heads.count, n + v});
  return {rows.slice(1, 0, n), rows.slice(1, n, v)};
}

}  // namespace isomer
