#include "layers/head.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/head_ops.h"
#include "kernels/matmul.h"

namespace isomer {

namespace {

constexpr std::int64_t kLogitBytes = 32 << 20;
constexpr std::int64_t kLeastRows = 16;

double logit_scale(const ModelConfig& config) {
  return config.dim_model_base > 0 ? config.dim_model_base / static_cast<double>(config.hidden_size) : 1;
}

void check_ids(std::string_view what, std::span<const std::int32_t> ids, std::int64_t least, std::int64_t vocabulary) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < least || ids[i] >= vocabulary) {
      invalid_argument("{} {} is {}, but the vocabulary has {} tokens: take the tokenizer of this model", what, i,
                       ids[i], vocabulary);
    }
  }
}

/// What one chunk of tokens needs; made once for all chunks.
struct HeadWorkspace {
  Tensor x_norm;   // [rows, D]
  Tensor rstd;     // [rows]
  Tensor logits;   // [rows, V] in the statistics' dtype
  Tensor dlogits;  // [rows, V] in x's dtype; `logits` itself where the dtypes agree
  Tensor dx_norm;  // [rows, D] in the statistics' dtype
  Tensor dnorm;    // [D], a later chunk's part
};

HeadWorkspace make_workspace(RankContext& ctx, const HeadLayer& layer, DType dtype, std::int64_t rows, bool gradients) {
  const std::int64_t hidden = layer.norm.numel(), vocabulary = layer.lm_head.size(0);
  const DType wide = statistic_dtype(dtype);
  const auto make = [&](std::string_view name, DType type, Shape shape) {
    return ctx.empty(name, MemoryClass::workspace, type, std::move(shape));
  };
  HeadWorkspace w;
  w.x_norm = make("x normed", dtype, {rows, hidden});
  w.rstd = make("rstd norm", wide, {rows});
  w.logits = make("logits", wide, {rows, vocabulary});
  if (!gradients) return w;
  w.dlogits = dtype == wide ? w.logits : make("d logits", dtype, {rows, vocabulary});
  w.dx_norm = make("d x normed", wide, {rows, hidden});
  w.dnorm = make("d norm of a chunk", wide, {hidden});
  return w;
}

/// The workspace of a chunk of fewer rows.
HeadWorkspace first_rows(const HeadWorkspace& w, std::int64_t rows) {
  const auto part = [&](const Tensor& t) { return t ? t.slice(0, 0, rows) : t; };
  return {part(w.x_norm), part(w.rstd), part(w.logits), part(w.dlogits), part(w.dx_norm), w.dnorm};
}

void chunk_logits(RankContext& ctx, const HeadLayer& layer, const Tensor& x, const HeadWorkspace& w) {
  rms_norm_forward(ctx, "norm", x, layer.norm, layer.config.rms_norm_eps, w.x_norm, w.rstd);
  matmul(ctx, "lm_head", w.x_norm, layer.lm_head.transpose(0, 1), w.logits);
}

void chunk_backward(RankContext& ctx, const HeadLayer& layer, const Tensor& x, const HeadWorkspace& w,
                    const HeadGradients& gradients, const Tensor& dx, bool first) {
  matmul(ctx, "d lm_head", w.dlogits.transpose(0, 1), w.x_norm, gradients.dlm_head, true);
  matmul(ctx, "dx lm_head", w.dlogits, layer.lm_head, w.dx_norm);
  rms_norm_backward(ctx, "norm backward",
                    {.x = x,
                     .rstd = w.rstd,
                     .weight = layer.norm,
                     .dy = w.dx_norm,
                     .dx = dx,
                     .dweight = first ? gradients.dnorm : w.dnorm});
  if (!first) add(ctx, "d norm", gradients.dnorm, w.dnorm, gradients.dnorm);
}

struct HeadRun {
  std::span<const std::int32_t> targets;
  std::int64_t chunk_rows = 0;
  double scale = 1;
  const HeadGradients* gradients = nullptr;
};

void check_head(const HeadLayer& layer, const Tensor& x, const HeadRun& run) {
  const std::int64_t hidden = layer.config.hidden_size;
  ISOMER_CHECK(x.dim() == 2 && x.size(1) == hidden && layer.norm.numel() == hidden && layer.lm_head.size(1) == hidden,
               "head: x {}, norm {}, lm_head {}", to_string(x.shape()), to_string(layer.norm.shape()),
               to_string(layer.lm_head.shape()));
  if (static_cast<std::int64_t>(run.targets.size()) != x.size(0)) {
    invalid_argument("{} targets for {} tokens: one a token, −1 where none is scored", run.targets.size(), x.size(0));
  }
  if (run.chunk_rows < 0) invalid_argument("chunk_rows = {}: 0 (chosen by memory) or more", run.chunk_rows);
  check_ids("target", run.targets, -1, layer.lm_head.size(0));
}

std::int64_t rows_of_chunk(const HeadLayer& layer, std::int64_t num_rows, std::int64_t asked) {
  const std::int64_t row_bytes = layer.lm_head.size(0) * size_of(DType::f32);
  const std::int64_t rows =
      asked > 0 ? asked : std::max(kLeastRows, kLogitBytes / std::max<std::int64_t>(row_bytes, 1));
  return std::min(rows, num_rows);
}

void clear(RankContext& ctx, const Tensor& t) {
  if (!ctx.dry_run() && t.numel() > 0) std::memset(t.raw(), 0, static_cast<std::size_t>(t.nbytes()));
}

/// Losses of all tokens go to `losses` [T]; the sum is taken in token order.
HeadLoss run_head(RankContext& ctx, const HeadLayer& layer, const Tensor& x, const HeadRun& run,
                  std::vector<double>& losses) {
  check_head(layer, x, run);
  const std::int64_t num_rows = x.size(0), chunk = rows_of_chunk(layer, num_rows, run.chunk_rows);
  losses.assign(static_cast<std::size_t>(num_rows), 0);
  std::vector<char> hits(losses.size(), 0);
  if (run.gradients != nullptr && num_rows == 0) clear(ctx, run.gradients->dnorm);
  const HeadWorkspace workspace = make_workspace(ctx, layer, x.dtype(), chunk, run.gradients != nullptr);
  for (std::int64_t begin = 0; begin < num_rows; begin += chunk) {
    const std::int64_t rows = std::min(chunk, num_rows - begin);
    const auto offset = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(rows);
    const HeadWorkspace w = first_rows(workspace, rows);
    const Tensor x_chunk = x.slice(0, begin, rows);
    chunk_logits(ctx, layer, x_chunk, w);
    cross_entropy(ctx, "cross-entropy",
                  {.logits = w.logits,
                   .targets = run.targets.subspan(offset, count),
                   .logit_scale = logit_scale(layer.config),
                   .gradient_scale = run.scale,
                   .dlogits = w.dlogits,
                   .losses = std::span(losses).subspan(offset, count),
                   .hits = std::span(hits).subspan(offset, count)});
    if (run.gradients == nullptr) continue;
    chunk_backward(ctx, layer, x_chunk, w, *run.gradients, run.gradients->dx.slice(0, begin, rows), begin == 0);
  }
  HeadLoss result;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    result.loss_sum += losses[i];
    result.num_targets += run.targets[i] >= 0 ? 1 : 0;
    result.num_correct += hits[i];
  }
  return result;
}

}  // namespace

Tensor embedding_forward(RankContext& ctx, const ModelConfig& config, const Tensor& embed_tokens,
                         std::span<const std::int32_t> ids) {
  check_ids("token", ids, 0, embed_tokens.size(0));
  Tensor x = ctx.empty("embedding", MemoryClass::saved, embed_tokens.dtype(),
                       {static_cast<std::int64_t>(ids.size()), embed_tokens.size(1)});
  embedding_rows(ctx, "embed_tokens", embed_tokens, ids, config.scale_emb, x);
  return x;
}

void embedding_backward(RankContext& ctx, const ModelConfig& config, std::span<const std::int32_t> ids,
                        const Tensor& dx, const Tensor& dembed_tokens) {
  check_ids("token", ids, 0, dembed_tokens.size(0));
  embedding_scatter(ctx, "d embed_tokens", dx, ids, config.scale_emb, dembed_tokens);
}

HeadLoss head_loss(RankContext& ctx, const HeadLayer& layer, const Tensor& x, std::span<const std::int32_t> targets,
                   std::int64_t chunk_rows) {
  std::vector<double> losses;
  return run_head(ctx, layer, x, {.targets = targets, .chunk_rows = chunk_rows}, losses);
}

HeadLoss head_loss_and_gradients(RankContext& ctx, const HeadLayer& layer, const Tensor& x,
                                 std::span<const std::int32_t> targets, double scale, const HeadGradients& gradients,
                                 std::int64_t chunk_rows) {
  std::vector<double> losses;
  const HeadRun run{.targets = targets, .chunk_rows = chunk_rows, .scale = scale, .gradients = &gradients};
  return run_head(ctx, layer, x, run, losses);
}

std::vector<double> head_token_losses(RankContext& ctx, const HeadLayer& layer, const Tensor& x,
                                      std::span<const std::int32_t> targets, std::int64_t chunk_rows) {
  std::vector<double> losses;
  run_head(ctx, layer, x, {.targets = targets, .chunk_rows = chunk_rows}, losses);
  return losses;
}

Tensor head_logits(RankContext& ctx, const HeadLayer& layer, const Tensor& x) {
  FunctionScope scope(ctx);
  HeadWorkspace w = make_workspace(ctx, layer, x.dtype(), x.size(0), false);
  chunk_logits(ctx, layer, x, w);
  const double scale = logit_scale(layer.config);
  if (scale != 1) scaled_sum(ctx, "logit scale", w.logits, Tensor(), scale, w.logits);
  scope.release(std::move(w.x_norm));
  return w.logits;
}

}  // namespace isomer
