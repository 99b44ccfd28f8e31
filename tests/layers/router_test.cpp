// The routers' rules at their edges: ties, masked groups beside negative choices, normalisation, given routings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "layers/ffn_fixture.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::ElementsAre;

/// One token whose logits are given: the gate is the identity times them.
Routed route_logits(const ModelConfig& config, const std::vector<double>& logits, const std::vector<double>& bias = {},
                    DType dtype = DType::f64) {
  const auto num_experts = static_cast<std::int64_t>(logits.size());
  RankContext ctx({});
  MoeWeights weights;
  weights.gate = tensor_of(logits, dtype, {num_experts, 1});
  if (!bias.empty()) {
    weights.e_score_correction_bias = tensor_of(bias, statistic_dtype(dtype), {num_experts});
  }
  return route(ctx, config, weights, tensor_of({1}, dtype, {1, 1}), {});
}

double sigma(double x) { return 1 / (1 + std::exp(-x)); }

ModelConfig router_config(RouterKind kind, std::int64_t experts, std::int64_t top_k, std::int64_t groups = 1,
                          std::int64_t kept = 1) {
  ModelConfig config = moe_config(kind, experts, top_k);
  config.moe.n_group = groups;
  config.moe.topk_group = kept;
  return config;
}

TEST(Router, EqualChoicesGoToTheLowestIndex) {
  for (const auto kind : {RouterKind::softmax_greedy, RouterKind::sigmoid_noaux_tc}) {
    EXPECT_THAT(route_logits(router_config(kind, 4, 2), {1, 2, 2, 2}).routing.experts, ElementsAre(1, 2));
    EXPECT_THAT(route_logits(router_config(kind, 4, 3), {0, 0, 0, 0}).routing.experts, ElementsAre(0, 1, 2));
  }
  // Groups tie as well: the first is kept.
  EXPECT_THAT(route_logits(router_config(RouterKind::softmax_group_limited, 4, 2, 2, 1), {1, 0, 0, 1}).routing.experts,
              ElementsAre(0, 1));
}

// Biases make every choice negative: a masked group filled with 0 instead of −∞ would win.
TEST(Router, MaskedGroupsLoseToNegativeChoices) {
  const ModelConfig config = router_config(RouterKind::sigmoid_noaux_tc, 6, 2, 3, 1);
  const std::vector<double> bias(6, -5);
  EXPECT_THAT(route_logits(config, {-1, -2, 3, 2, 0, 0}, bias).routing.experts, ElementsAre(2, 3));
  EXPECT_THAT(route_logits(config, {-1, -2, 3, 2, 0, 0}, {-5, -5, -9, -9, -5, -5}).routing.experts, ElementsAre(4, 5));
}

// V3 adds a group's two best: {2, 2} beats {3, −3}; V2 takes the best.
TEST(Router, AGroupsScore) {
  const std::vector<double> logits{3, -3, 2, 2};
  EXPECT_THAT(route_logits(router_config(RouterKind::sigmoid_noaux_tc, 4, 1, 2, 1), logits).routing.experts,
              ElementsAre(2));
  EXPECT_THAT(route_logits(router_config(RouterKind::softmax_group_limited, 4, 1, 2, 1), logits).routing.experts,
              ElementsAre(0));
  // Greedy knows no groups, whatever the configuration says.
  EXPECT_THAT(route_logits(router_config(RouterKind::softmax_greedy, 4, 3, 2, 1), logits).routing.experts,
              ElementsAre(0, 2, 3));
}

TEST(Router, TheBiasChoosesAndDoesNotWeigh) {
  ModelConfig config = router_config(RouterKind::sigmoid_noaux_tc, 3, 2);
  config.moe.norm_topk_prob = false;
  const Routed routed = route_logits(config, {1, 0, -1}, {0, 0, 10});
  EXPECT_THAT(routed.routing.experts, ElementsAre(2, 0));
  EXPECT_LE(max_difference(values_of(routed.weights), {2.5 * sigma(-1), 2.5 * sigma(1)}), 4 * epsilon_of(DType::f64));
  config.moe.norm_topk_prob = true;
  const double sum = sigma(-1) + sigma(1);
  EXPECT_LE(max_difference(values_of(route_logits(config, {1, 0, -1}, {0, 0, 10}).weights),
                           {2.5 * sigma(-1) / sum, 2.5 * sigma(1) / sum}),
            8 * epsilon_of(DType::f64));
}

TEST(Router, V2RenormalisesOrScales) {
  const std::vector<double> logits{std::log(1.0), std::log(2.0), std::log(5.0)};  // p = 1/8, 2/8, 5/8
  ModelConfig config = router_config(RouterKind::softmax_greedy, 3, 2);
  const double bound = 16 * epsilon_of(DType::f64);
  EXPECT_LE(max_difference(values_of(route_logits(config, logits).weights), {2.5 * 5 / 8, 2.5 * 2 / 8}), bound);
  config.moe.norm_topk_prob = true;
  EXPECT_LE(max_difference(values_of(route_logits(config, logits).weights), {5.0 / 7, 2.0 / 7}), bound);
  config.moe.num_experts_per_tok = 1;  // one expert: no renormalisation, hence the factor
  EXPECT_LE(max_difference(values_of(route_logits(config, logits).weights), {2.5 * 5 / 8}), bound);
}

// The difference of these logits is lost in bfloat16: scores must come from float32 sums.
TEST(Router, ScoresAreFloat32BesideBfloat16) {
  const ModelConfig config = router_config(RouterKind::softmax_greedy, 2, 1);
  RankContext ctx({});
  MoeWeights weights;
  weights.gate = tensor_of({1, 0, 1, 0.0078125}, DType::bf16, {2, 2});
  const Routed routed = route(ctx, config, weights, tensor_of({1, 0.0625}, DType::bf16, {1, 2}), {});
  EXPECT_EQ(routed.scores.dtype(), DType::f32);
  EXPECT_THAT(routed.routing.experts, ElementsAre(1));
  const double p = sigma(0.0625 * 0.0078125);
  EXPECT_NEAR(values_of(routed.scores)[1], p, 2 * epsilon_of(DType::f32));
}

TEST(Router, NanScoresStillGiveDifferentExperts) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto experts =
      route_logits(router_config(RouterKind::sigmoid_noaux_tc, 8, 4, 4, 2), std::vector<double>(8, nan))
          .routing.experts;
  EXPECT_EQ(std::set<std::int32_t>(experts.begin(), experts.end()).size(), 4);
}

TEST(GivenRouting, BalancedAndZipf) {
  using Kind = RoutingSource::Kind;
  const Routing balanced = given_routing({.kind = Kind::balanced}, 3, 2, 4);
  EXPECT_THAT(balanced.experts, ElementsAre(0, 1, 2, 3, 0, 1));
  const Routing zipf = given_routing({.kind = Kind::zipf, .seed = 7}, 4000, 2, 8);
  EXPECT_EQ(zipf.experts, given_routing({.kind = Kind::zipf, .seed = 7}, 4000, 2, 8).experts);
  EXPECT_NE(zipf.experts, given_routing({.kind = Kind::zipf, .seed = 8}, 4000, 2, 8).experts);
  std::vector<double> first(8, 0);
  for (std::size_t t = 0; t < 4000; ++t) {
    EXPECT_NE(zipf.experts[2 * t], zipf.experts[2 * t + 1]);
    first[static_cast<std::size_t>(zipf.experts[2 * t])] += 1.0 / 4000;
  }
  // The first draw has probability (1/r)/H_8, H_8 = 2.718: 0.368, …, 0.046; a share of 4000 is known to 0.008.
  std::sort(first.rbegin(), first.rend());
  for (std::size_t r = 0; r < 8; ++r) EXPECT_NEAR(first[r], 1 / (static_cast<double>(r + 1) * 2.7179), 0.025) << r;
}

TEST(GivenRouting, AReplayOfAnotherShapeIsRefused) {
  const Routing replay{.num_tokens = 2, .top_k = 1, .experts = {0, 1}};
  EXPECT_THAT([&] { given_routing({.kind = RoutingSource::Kind::replayed, .replay = &replay}, 3, 1, 4); },
              ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("2 tokens × 1 experts")));
  EXPECT_THROW(given_routing({.kind = RoutingSource::Kind::replayed}, 3, 1, 4), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
