// Float64 reference of a whole decoder language model, forward and backward: embedding → (attention block, FFN block) ×
// layers → norm → head → cross-entropy. Latent or grouped-query attention, dense or mixture of experts; packed
// documents see nothing of each other. Composed of the reference blocks beside it; shares nothing with the fast path
// but the RoPE table.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

/// T tokens in rows of any order.
struct LanguageModelReferenceInput {
  const std::map<std::string, std::vector<double>>& weights;  // by checkpoint name, a tied head absent
  std::vector<std::int32_t> tokens;                           // [T]
  std::vector<std::int32_t> targets;                          // [T]; negative: not scored
  std::vector<int> segments;            // [T]; a row attends to rows of its segment at positions up to its own
  std::vector<std::int64_t> positions;  // [T]; those of a segment are consecutive
  std::int64_t run_length = 0;          // positions of the run, for longrope; 0: the largest of `positions` + 1
  std::vector<std::vector<std::int32_t>> experts;  // by layer, [T, top_k] of a MoE layer; empty: the router chooses
  double loss_scale = 0;  // gradients are those of loss_scale · Σ losses; 0: of the mean over scored tokens
};

struct LanguageModelReferenceResult {
  double loss = 0;             // mean over scored tokens, nats
  std::vector<double> losses;  // [T]; 0 where not scored
  std::int64_t num_targets = 0, num_correct = 0;
  std::vector<std::vector<double>> layer_outputs;        // by layer, [T, D]
  std::vector<std::vector<std::int32_t>> experts;        // by layer, [T, top_k]; empty for a dense layer
  std::map<std::string, std::vector<double>> gradients;  // by checkpoint name; none of e_score_correction_bias
};

/// Throws std::invalid_argument naming a weight that is missing, of the wrong size or without a place, a token outside
/// the vocabulary, or a segment whose positions are not consecutive. The result does not depend on `num_threads`.
LanguageModelReferenceResult language_model_reference(const ModelConfig& config,
                                                      const LanguageModelReferenceInput& input, int num_threads);

/// All weights of a model, widened, under their checkpoint names.
std::map<std::string, std::vector<double>> widened_model_weights(const ModelWeights& weights);

}  // namespace isomer
