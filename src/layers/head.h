// Embedding, last norm, head and cross-entropy on one rank's tokens. The logits of a long sequence never stand in
// memory at once: the loss is computed in chunks of tokens, its gradient in the same pass. Logits are float32 (float64
// for float64), divided by hidden_size/dim_model_base where the configuration has one; their gradient is rounded to the
// operands' dtype for the products. Results don't depend on the number of threads. Another chunk_rows regroups the sums
// of dlm_head and dnorm, and may change a product's kernel: results agree to rounding, not to the bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/rank_context.h"
#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

/// Rows of embed_tokens times scale_emb: [ids.size(), D], class saved. Throws std::invalid_argument for an id outside
/// the vocabulary.
Tensor embedding_forward(RankContext& ctx, const ModelConfig& config, const Tensor& embed_tokens,
                         std::span<const std::int32_t> ids);
/// dembed_tokens [V, D] (float32) += the rows' gradients, in token order.
void embedding_backward(RankContext& ctx, const ModelConfig& config, std::span<const std::int32_t> ids,
                        const Tensor& dx, const Tensor& dembed_tokens);

struct HeadLayer {
  const ModelConfig& config;
  const Tensor& norm;     // [D]
  const Tensor& lm_head;  // [V, D]
};

struct HeadLoss {
  double loss_sum = 0;           // Σ −ln p(target) in nats over the rank's scored tokens, in float64
  std::int64_t num_targets = 0;  // targets ≥ 0
  std::int64_t num_correct = 0;  // greedy hits
};

/// Loss of x [T, D] against targets (−1: not scored), without gradients (0 in a dry run).
HeadLoss head_loss(RankContext& ctx, const HeadLayer& layer, const Tensor& x, std::span<const std::int32_t> targets,
                   std::int64_t chunk_rows = 0);

struct HeadGradients {
  Tensor dx;        // [T, D], x's dtype, out
  Tensor dnorm;     // [D] float32, out
  Tensor dlm_head;  // [V, D] float32, added to
};
/// The same, with the gradient of scale·loss_sum. A tied head is given the embedding's gradient as dlm_head. Workspace
/// is chunk_rows·V (chunk_rows 0: as many rows as make about 32 MiB of float32 logits, at least 16).
HeadLoss head_loss_and_gradients(RankContext& ctx, const HeadLayer& layer, const Tensor& x,
                                 std::span<const std::int32_t> targets, double scale, const HeadGradients& gradients,
                                 std::int64_t chunk_rows = 0);

/// −ln p(target) of every token (0 where not scored), [T] float64 on the host; for evaluation.
std::vector<double> head_token_losses(RankContext& ctx, const HeadLayer& layer, const Tensor& x,
                                      std::span<const std::int32_t> targets, std::int64_t chunk_rows = 0);

/// Logits [T, V] float32 (workspace) of a few rows.
Tensor head_logits(RankContext& ctx, const HeadLayer& layer, const Tensor& x);

}  // namespace isomer
