// The mixture of experts against the float64 reference, over routers, odd shapes and routings at the edge.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/ffn_ops.h"
#include "layers/ffn_fixture.h"

namespace isomer {
namespace {

using namespace testing;

constexpr RouterKind kRouters[] = {RouterKind::softmax_greedy, RouterKind::softmax_group_limited,
                                   RouterKind::sigmoid_noaux_tc};

struct MoeProblem {
  ModelConfig config;
  LayerWeights weights;
  Tensor x, dy;
};

MoeProblem make_problem(const ModelConfig& config, DType dtype, std::int64_t tokens) {
  const Shape rows{tokens, config.hidden_size};
  return {config, make_ffn_weights(config, dtype), tensor_of(noise_values(50, num_elements(rows)), dtype, rows),
          tensor_of(noise_values(51, num_elements(rows)), dtype, rows)};
}

/// Runs with `source` and holds everything against the reference with the same choice.
FfnOutcome expect_agreement(const MoeProblem& p, const RoutingSource& source = {}) {
  const FfnOutcome outcome = run_ffn(p.config, p.weights, p.x, p.dy, source);
  const auto expected =
      ffn_reference(p.config, widened_ffn_weights(p.weights), values_of(p.x), values_of(p.dy), outcome.routing.experts);
  const DType dtype = p.x.dtype();
  expect_ffn(outcome, expected, ffn_bound(dtype));
  // x normed is rounded to bfloat16 before the router; a score's slope is at most 1/4 in logits of size 5.
  EXPECT_LE(max_relative_difference(values_of(outcome.scores), expected.scores), ffn_bound(dtype));
  return outcome;
}

class Moe : public ::testing::TestWithParam<std::tuple<RouterKind, DType, std::int64_t>> {};

TEST_P(Moe, AgreesWithTheReference) {
  const auto& [router, dtype, tokens] = GetParam();
  const MoeProblem p = make_problem(moe_config(router), dtype, tokens);
  const FfnOutcome outcome = expect_agreement(p);
  // Where no two choices are within rounding of each other the reference chooses the same.
  if (dtype == DType::f64) {
    EXPECT_EQ(outcome.routing.experts,
              ffn_reference(p.config, widened_ffn_weights(p.weights), values_of(p.x), {}).experts);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, Moe,
                         ::testing::Combine(::testing::ValuesIn(kRouters),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16),
                                            ::testing::Values(1, 3, 66, 129)));

TEST(MoeLayer, NoTokens) {
  const MoeProblem p = make_problem(moe_config(RouterKind::sigmoid_noaux_tc), DType::f32, 0);
  const FfnOutcome outcome = run_ffn(p.config, p.weights, p.x, p.dy);
  int count = 0;
  for_each_ffn_gradient(outcome.gradients, [&](const std::string& name, const Tensor& gradient) {
    ++count;
    EXPECT_EQ(max_magnitude(values_of(gradient)), 0) << name;
  });
  EXPECT_EQ(count, 2 + 3 * (8 + 1));
}

TEST(MoeLayer, OneExpertATokenAndAllOfThem) {
  for (const std::int64_t top_k : {1, 8}) {
    for (const RouterKind router : kRouters) {
      ModelConfig config = moe_config(router, 8, top_k);
      config.moe.n_group = config.moe.topk_group = 1;
      config.moe.n_shared_experts = 0;
      config.moe.norm_topk_prob = true;
      expect_agreement(make_problem(config, DType::f64, 11));
      expect_agreement(make_problem(config, DType::f32, 11));
    }
  }
}

TEST(MoeLayer, AllTokensToOneExpertLeaveTheOthersZeroGradients) {
  ModelConfig config = moe_config(RouterKind::sigmoid_noaux_tc, 8, 1);
  config.moe.norm_topk_prob = false;  // one weight normalised is 1, and its gradient rounding alone
  const MoeProblem p = make_problem(config, DType::f32, 37);
  Routing routing{.num_tokens = 37, .top_k = 1, .experts = std::vector<std::int32_t>(37, 5)};
  const FfnOutcome outcome = expect_agreement(p, {.kind = RoutingSource::Kind::replayed, .replay = &routing});
  EXPECT_EQ(max_magnitude(values_of(outcome.gradients.moe.experts[4].up_proj)), 0);
  EXPECT_GT(max_magnitude(values_of(outcome.gradients.moe.experts[5].up_proj)), 0);
}

// Groups of rows longer than one piece, and of every rest: the products are cut into fixed sizes.
TEST(MoeLayer, UnevenExpertsOfManyRows) {
  ModelConfig config = moe_config(RouterKind::softmax_greedy, 4, 1);
  config.moe.n_shared_experts = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const MoeProblem p = make_problem(config, dtype, 900);
    Routing routing{.num_tokens = 900, .top_k = 1};
    for (std::int32_t t = 0; t < 900; ++t) routing.experts.push_back(t < 701 ? 2 : t < 714 ? 0 : 3);
    expect_agreement(p, {.kind = RoutingSource::Kind::replayed, .replay = &routing});
  }
}

TEST(MoeLayer, ThreadsChangeNoBit) {
  ModelConfig config = moe_config(RouterKind::sigmoid_noaux_tc);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const MoeProblem p = make_problem(config, dtype, 1300);
    const FfnOutcome one = run_ffn(config, p.weights, p.x, p.dy), three = run_ffn(config, p.weights, p.x, p.dy, {}, 3);
    EXPECT_EQ(one.routing.experts, three.routing.experts);
    EXPECT_EQ(values_of(one.y), values_of(three.y));
    EXPECT_EQ(values_of(one.dx), values_of(three.dx));
    std::map<std::string, std::vector<double>> gradients;
    for_each_ffn_gradient(one.gradients, [&](const auto& name, const Tensor& g) { gradients[name] = values_of(g); });
    for_each_ffn_gradient(three.gradients,
                          [&](const auto& name, const Tensor& g) { EXPECT_EQ(gradients[name], values_of(g)) << name; });
  }
}

TEST(MoeLayer, AGradientByTheScoresFromElsewhereReachesGateAndInput) {
  const MoeProblem p = make_problem(moe_config(RouterKind::softmax_greedy), DType::f64, 9);
  RankContext ctx({});
  const FfnLayer layer{p.config, p.weights};
  const auto run = [&](bool with) {
    FfnSaved saved;
    FfnOutcome outcome;
    ffn_forward(ctx, layer, p.x, {}, saved);
    if (with) saved.dscores = tensor_of(noise_values(80, 9 * 8), DType::f64, {9, 8});
    outcome.dx = ffn_backward(ctx, layer, std::move(saved), p.dy, outcome.gradients);
    return outcome;
  };
  // Σ scores·dscores of the reference, moved along the gate, has what the gate's gradient gains as its derivative.
  FfnReferenceWeights w = widened_ffn_weights(p.weights);
  const std::vector<double> before = w.router, dscores = noise_values(80, 9 * 8);
  const auto direction = noise_values(81, static_cast<std::int64_t>(before.size()), 0.1);
  const auto loss_at = [&](double step) {
    for (std::size_t i = 0; i < before.size(); ++i) w.router[i] = before[i] + step * direction[i];
    const auto scores = ffn_reference(p.config, w, values_of(p.x), {}).scores;
    double loss = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) loss += scores[i] * dscores[i];
    return loss;
  };
  const double quotient = (8 * (loss_at(1e-3) - loss_at(-1e-3)) - (loss_at(2e-3) - loss_at(-2e-3))) / 12e-3;
  const auto with = run(true), without = run(false);
  const auto a = values_of(with.gradients.moe.gate), b = values_of(without.gradients.moe.gate);
  double gained = 0;
  for (std::size_t i = 0; i < a.size(); ++i) gained += (a[i] - b[i]) * direction[i];
  EXPECT_NEAR(gained, quotient, 1e-9);  // step⁴ and ε/step
  EXPECT_GT(max_difference(values_of(with.dx), values_of(without.dx)), 1e-3);
}

std::vector<std::string> standing_lines(RankContext& ctx) {
  std::vector<std::string> lines;
  for (const StandingTensor& t : ctx.memory().standing_at_peak()) {
    lines.push_back(fmt::format("{} {} {}", t.name, name_of(t.memory_class), t.bytes));
  }
  return lines;
}

std::vector<std::string> operation_lines(RankContext& ctx) {
  std::vector<std::string> lines;
  for (const auto& [key, summary] : ctx.ops().summaries()) {
    lines.push_back(fmt::format("{} {} {}", key.name, summary.calls, summary.cost.flops));
  }
  return lines;
}

TEST(MoeLayer, ADryRunHasTheMemoryAndOperationsOfARealOne) {
  for (const auto kind : {RoutingSource::Kind::balanced, RoutingSource::Kind::zipf}) {
    const MoeProblem p = make_problem(moe_config(RouterKind::sigmoid_noaux_tc), DType::bf16, 77);
    RankContext real({}), dry({.dry_run = true});
    const RoutingSource source{.kind = kind, .seed = 3};
    run_ffn(real, p.config, p.weights, p.x, p.dy, source);
    const Tensor x = Tensor::unrecorded("x", DType::bf16, p.x.shape(), true);
    const FfnOutcome outcome = run_ffn(dry, p.config, p.weights, x, x, source);
    EXPECT_TRUE(outcome.dx.shape_only());
    EXPECT_EQ(real.memory().peak_activation_bytes(), dry.memory().peak_activation_bytes());
    EXPECT_EQ(standing_lines(real), standing_lines(dry));
    EXPECT_EQ(operation_lines(real), operation_lines(dry));
  }
}

TEST(MoeLayer, WhatAForwardSaves) {
  const MoeProblem p = make_problem(moe_config(RouterKind::sigmoid_noaux_tc), DType::bf16, 10);
  RankContext ctx({});
  FfnSaved saved;
  ffn_forward(ctx, {p.config, p.weights}, p.x, {}, saved);
  // Shared gate and up of 2·13, experts' gate and up of 13 and output of 20 for 3 experts a token; scores and rstd.
  EXPECT_EQ(ctx.memory().current_bytes(MemoryClass::saved), 10 * (2 * 26 * 2 + 3 * (2 * 13 + 20) * 2 + 8 * 4 + 4));
  EXPECT_EQ(ctx.memory().current_bytes(MemoryClass::workspace), 0);
}

TEST(SortByExpert, RefusesWhatIsNoRouting) {
  const std::vector<std::int32_t> outside{0, 4}, twice{1, 1};
  EXPECT_THAT([&] { sort_by_expert(outside, 1, 2, 4); },
              ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("expert 4: experts are 0 to 3")));
  EXPECT_THAT([&] { sort_by_expert(twice, 1, 2, 4); },
              ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("twice")));
}

}  // namespace
}  // namespace isomer
