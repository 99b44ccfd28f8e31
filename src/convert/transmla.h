// One layer of grouped-query attention as latent attention (model-math: GQA → MLA; TransMLA, arXiv 2502.07864), in
// float64. k KV heads of w = head_dim elements, h query heads, D = hidden_size.
//
// What is calibrated on are linear functions of the layer's normed input x̂ (keys before RoPE, values), so one second
// moment, Σ x̂ x̂ᵀ, gives those of both steps.
//
//   1. rotation   For each frequency (or `freqfold` neighbours as one) the k heads' keys are turned by one orthogonal
//                 matrix, the same on the real and the imaginary half, that puts most of their energy into the first:
//                 it commutes with RoPE, so that nothing is lost as long as all of them keep it (freqfold 1; folding
//                 treats neighbouring frequencies as equal, which loses something already).
//   2. RoPE dropped on all but the leading r of them, one rope key for all heads.
//   3. PCA of the rest beside the values, [K_nope/ρ | V], of which the d leading directions are kept.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/weights.h"

namespace isomer {

struct TransMlaOptions {
  std::int64_t kv_lora_rank = 0;      // d ≤ 2·k·w − r
  std::int64_t qk_rope_head_dim = 0;  // r = w/collapse
  std::int64_t freqfold = 1;          // neighbouring frequencies as one: a multiple of collapse, a divisor of w/2
  double balance = 1;                 // ρ = ‖K_nope‖ / (‖V‖·balance), mean norms of columns
};

/// Throws std::invalid_argument naming parameter, value and limit; for a model that is not grouped-query, or has a RoPE
/// scaling other than none, linear and llama3.
void check_transmla_options(const TransMlaOptions& options, const ModelConfig& config);

/// Σ x̂ x̂ᵀ over a calibration text.
struct InputMoment {
  std::int64_t num_tokens = 0;
  std::vector<double> second;  // [D, D]
};

/// Orthogonal: new key components from the old ones. Rows 2p and 2p + 1 are the real and the imaginary part of pair p,
/// which turns with the original's frequency number frequency[p]; the r/2 pairs that stay roped come first, in the
/// order of frequencies.
struct KeyRotation {
  std::vector<double> rows;             // [k·w, k·w]
  std::vector<std::int64_t> frequency;  // [k·w/2]
};
KeyRotation rotate_keys(const ModelConfig& config, const TransMlaOptions& options, const std::vector<double>& k_proj,
                        const InputMoment& moment);

/// The latent layer after a step.
enum class TransMlaStep : std::uint8_t {
  rotated,       // every component keeps RoPE: r = k·w, d = k·w
  rope_dropped,  // r as asked for, d = 2·k·w − r: nothing is cut
  reduced        // d as asked for
};
/// What such a model's configuration is; the rotated one's frequencies are a longrope scaling of its own and it is no
/// model to write down.
ModelConfig transmla_config(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step,
                            const std::vector<std::int64_t>& frequency);

/// The layer's weights, float32. o_proj and the norm are those of `weights`.
AttentionWeights transmla_layer(const ModelConfig& config, const TransMlaOptions& options, TransMlaStep step,
                                const AttentionWeights& weights, const KeyRotation& rotation,
                                const InputMoment& moment);

}  // namespace isomer
