// Small layers with seeded weights for the tests of the feed-forward half, and how their results are held against the
// float64 reference.
#pragma once

#include <gtest/gtest.h>

#include <map>

#include "kernels/elementwise.h"
#include "layers/ffn.h"
#include "layers/reference/ffn.h"
#include "tensor_values.h"

namespace isomer::testing {

/// One layer of `config`: a dense one, or experts where config.moe has some. Weights have the scale of 1/√fan_in, the
/// router's gate three times that, so that scores differ.
inline LayerWeights make_ffn_weights(const ModelConfig& config, DType dtype, std::uint64_t seed = 1) {
  const std::int64_t hidden = config.hidden_size;
  const auto matrix = [&](std::int64_t out, std::int64_t in, double gain = 1) {
    return tensor_of(noise_values(++seed, out * in, gain / std::sqrt(static_cast<double>(in))), dtype, {out, in});
  };
  const auto mlp = [&](std::int64_t width) {
    return MlpWeights{
        .gate_proj = matrix(width, hidden), .up_proj = matrix(width, hidden), .down_proj = matrix(hidden, width)};
  };
  LayerWeights w;
  w.post_attention_layernorm = tensor_of(noise_values(++seed, hidden, 0.3, 1), dtype, {hidden});
  const MoeConfig& moe = config.moe;
  if (moe.n_routed_experts == 0) {
    w.mlp = mlp(config.intermediate_size);
    return w;
  }
  w.moe.gate = matrix(moe.n_routed_experts, hidden, 3);
  if (moe.router == RouterKind::sigmoid_noaux_tc) {
    w.moe.e_score_correction_bias =
        tensor_of(noise_values(++seed, moe.n_routed_experts, 0.1), statistic_dtype(dtype), {moe.n_routed_experts});
  }
  for (std::int64_t e = 0; e < moe.n_routed_experts; ++e) w.moe.experts.push_back(mlp(moe.moe_intermediate_size));
  if (moe.n_shared_experts > 0) w.moe.shared_experts = mlp(moe.n_shared_experts * moe.moe_intermediate_size);
  return w;
}

inline ModelConfig dense_config(std::int64_t hidden = 20, std::int64_t width = 37) {
  ModelConfig config;
  config.name = "dense";
  config.hidden_size = hidden;
  config.intermediate_size = width;
  config.num_hidden_layers = 4;
  config.rms_norm_eps = 1e-5;
  return config;
}

inline ModelConfig moe_config(RouterKind router, std::int64_t experts = 8, std::int64_t top_k = 3) {
  ModelConfig config = dense_config();
  config.name = "experts";
  config.moe = {.n_routed_experts = experts,
                .num_experts_per_tok = top_k,
                .n_shared_experts = 2,
                .moe_intermediate_size = 13,
                .n_group = 4,
                .topk_group = 2,
                .norm_topk_prob = router == RouterKind::sigmoid_noaux_tc,
                .routed_scaling_factor = 2.5,
                .router = router};
  return config;
}

/// fn(name, tensor) for the defined gradients, under checkpoint names below `model.layers.L.`.
template <class Fn>
void for_each_ffn_gradient(const FfnGradients& gradients, Fn&& fn) {
  ModelWeights model;
  model.layers.resize(1);
  model.layers[0].post_attention_layernorm = gradients.post_attention_layernorm;
  model.layers[0].mlp = gradients.mlp;
  model.layers[0].moe = gradients.moe;
  model.for_each([&](const std::string& name, const Tensor& tensor) {
    fn(name.substr(std::string_view("model.layers.0.").size()), tensor);
  });
}

struct FfnOutcome {
  Tensor y, dx;
  Tensor scores;
  Routing routing;
  FfnGradients gradients;
};

/// Forward and backward on one rank.
inline FfnOutcome run_ffn(RankContext& ctx, const ModelConfig& config, const LayerWeights& weights, const Tensor& x,
                          const Tensor& dy, const RoutingSource& source = {}) {
  const FfnLayer layer{config, weights};
  FfnSaved saved;
  FfnOutcome outcome;
  outcome.y = ffn_forward(ctx, layer, x, source, saved);
  outcome.scores = saved.scores;
  outcome.routing = saved.routing;
  outcome.dx = ffn_backward(ctx, layer, std::move(saved), dy, outcome.gradients);
  return outcome;
}

inline FfnOutcome run_ffn(const ModelConfig& config, const LayerWeights& weights, const Tensor& x, const Tensor& dy,
                          const RoutingSource& source = {}, int num_threads = 1) {
  RankContext ctx({.num_threads = num_threads});
  ctx.memory().poison = true;
  return run_ffn(ctx, config, weights, x, dy, source);
}

/// Every output and gradient within `bound` of the reference, relative to each tensor's largest value.
inline void expect_ffn(const FfnOutcome& outcome, const FfnReferenceResult& expected, double bound) {
  EXPECT_LE(max_relative_difference(values_of(outcome.y), expected.y), bound) << "y";
  EXPECT_LE(max_relative_difference(values_of(outcome.dx), expected.dx), bound) << "dx";
  std::size_t count = 0;
  for_each_ffn_gradient(outcome.gradients, [&](const std::string& name, const Tensor& gradient) {
    ++count;
    ASSERT_TRUE(expected.gradients.contains(name)) << name;
    EXPECT_LE(max_relative_difference(values_of(gradient), expected.gradients.at(name)), bound) << name;
  });
  EXPECT_EQ(count, expected.gradients.size());
}

/// float64 and float32: sums of at most some hundred terms, an exp, divisions: some ten ε. bfloat16: x normed, gate,
/// up, activation, outputs and their gradients round to 8 bits, half an ε each, up to eight deep; the largest value of
/// a gradient of few terms is no larger than one of them.
inline double ffn_bound(DType dtype) { return dtype == DType::bf16 ? 6 * epsilon_of(dtype) : 64 * epsilon_of(dtype); }

}  // namespace isomer::testing
