// The router of a mixture of experts, from logits to weights and back (DeepSeek-V2 and V3; model-math: Router). All of
// it in float32 (float64 for float64 models).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

struct RouterRule {
  bool sigmoid = false;  // else softmax
  std::int64_t top_k = 1;
  std::int64_t n_group = 1, topk_group = 1;  // n_group 1: no group step
  std::int64_t group_best = 1;               // a group's score: the sum of that many of its largest choices
  bool normalise = false;                    // weights / (Σ + 1e-20)
  double factor = 1;                         // then times this
};

/// scores = σ(logits), or softmax(logits) by row; [num_tokens, num_experts], in place allowed.
void router_scores(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& logits,
                   const Tensor& scores);

/// experts [num_tokens, top_k], best first: the largest of scores + bias among the experts of the topk_group best
/// groups; the others cannot be chosen, however small the rest. Of equals the lowest index wins, among experts and
/// among groups. `bias` [num_experts] or undefined.
void choose_experts(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                    const Tensor& bias, std::span<std::int32_t> experts);

/// weights [num_tokens, top_k]: the chosen experts' scores without the bias, normalised and scaled by the rule.
void router_weights(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                    std::span<const std::int32_t> experts, const Tensor& weights);

/// dlogits [num_tokens, num_experts] of dweights [num_tokens, top_k] through weights and scores; the choice has no
/// gradient. `dscores` (of a balance loss, say), [num_tokens, num_experts] or undefined, is added before the scores'
/// derivative.
void router_backward(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                     std::span<const std::int32_t> experts, const Tensor& dweights, const Tensor& dscores,
                     const Tensor& dlogits);

}  // namespace isomer
