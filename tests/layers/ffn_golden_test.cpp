// The fast path of a layer's second half and of the head, and their float64 references, against the NumPy golden files,
// which share no code with either.
#include <gtest/gtest.h>

#include "golden/golden_file.h"
#include "layers/ffn_fixture.h"
#include "layers/head.h"
#include "layers/reference/head.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using namespace testing;

Tensor golden_tensor(const GoldenFile& file, const std::string& name, DType dtype) {
  return file.has(name) ? tensor_of(file.values(name), dtype, file.tensors.at(name).shape) : Tensor();
}

LayerWeights golden_weights(const GoldenFile& file, const ModelConfig& config, DType dtype) {
  const auto mlp = [&](const std::string& prefix) {
    return MlpWeights{.gate_proj = golden_tensor(file, prefix + ".gate_proj.weight", dtype),
                      .up_proj = golden_tensor(file, prefix + ".up_proj.weight", dtype),
                      .down_proj = golden_tensor(file, prefix + ".down_proj.weight", dtype)};
  };
  LayerWeights w;
  w.post_attention_layernorm = golden_tensor(file, "post_attention_layernorm.weight", dtype);
  w.mlp = mlp("mlp");
  w.moe.gate = golden_tensor(file, "mlp.gate.weight", dtype);
  w.moe.e_score_correction_bias = golden_tensor(file, "mlp.gate.e_score_correction_bias", statistic_dtype(dtype));
  for (std::int64_t e = 0; e < config.moe.n_routed_experts; ++e) {
    w.moe.experts.push_back(mlp(fmt::format("mlp.experts.{}", e)));
  }
  w.moe.shared_experts = mlp("mlp.shared_experts");
  return w;
}

std::vector<std::int32_t> integers(const std::vector<double>& values) {
  std::vector<std::int32_t> result;
  for (const double value : values) result.push_back(static_cast<std::int32_t>(value));
  return result;
}

/// As ffn_bound, where bfloat16 rounds the files' float32 weights and inputs as well.
double golden_bound(DType dtype) { return dtype == DType::bf16 ? 16 * epsilon_of(dtype) : ffn_bound(dtype); }

class FfnGolden : public ::testing::TestWithParam<std::tuple<const char*, DType>> {};

TEST_P(FfnGolden, AgreesWithTheNumpyOracle) {
  const auto& [name, dtype] = GetParam();
  const GoldenFile file = golden::read_golden_file(name);
  const ModelConfig config = golden::make_model_config(file);
  const LayerWeights weights = golden_weights(file, config, dtype);
  ASSERT_TRUE(weights.is_moe());
  const auto experts = integers(file.values("intermediate.experts"));
  const std::int64_t num_tokens = file.tensors.at("x").shape[0];
  // Rounded weights may choose otherwise: bfloat16 is told the choice.
  const Routing replay{.num_tokens = num_tokens, .top_k = config.moe.num_experts_per_tok, .experts = experts};
  RoutingSource source;
  if (dtype == DType::bf16) source = {.kind = RoutingSource::Kind::replayed, .replay = &replay};
  const FfnOutcome outcome =
      run_ffn(config, weights, golden_tensor(file, "x", dtype), golden_tensor(file, "dy", dtype), source);
  const double bound = golden_bound(dtype);
  EXPECT_EQ(outcome.routing.experts, experts);
  EXPECT_LE(max_relative_difference(values_of(outcome.scores), file.values("intermediate.scores")), bound);
  EXPECT_LE(max_relative_difference(values_of(outcome.y), file.values("y")), bound);
  EXPECT_LE(max_relative_difference(values_of(outcome.dx), file.values("dx")), bound);
  int count = 0;
  for_each_ffn_gradient(outcome.gradients, [&](const std::string& weight, const Tensor& gradient) {
    ++count;
    EXPECT_LE(max_relative_difference(values_of(gradient), file.values("grad." + weight)), bound) << weight;
  });
  EXPECT_EQ(count, 2 + 3 * (8 + 1));
}

INSTANTIATE_TEST_SUITE_P(Files, FfnGolden,
                         ::testing::Combine(::testing::Values("ffn_v3", "ffn_v2_groups"),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16)));

TEST(FfnReferenceGolden, AgreesWithTheNumpyOracle) {
  for (const char* name : {"ffn_v3", "ffn_v2_groups"}) {
    const GoldenFile file = golden::read_golden_file(name);
    const ModelConfig config = golden::make_model_config(file);
    const auto result = ffn_reference(config, widened_ffn_weights(golden_weights(file, config, DType::f64)),
                                      file.values("x"), file.values("dy"));
    const double bound = ffn_bound(DType::f64);
    EXPECT_EQ(result.experts, integers(file.values("intermediate.experts")));
    EXPECT_LE(max_relative_difference(result.weights, file.values("intermediate.weights")), bound);
    EXPECT_LE(max_relative_difference(result.y, file.values("y")), bound);
    EXPECT_LE(max_relative_difference(result.dx, file.values("dx")), bound);
    for (const auto& [weight, gradient] : result.gradients) {
      EXPECT_LE(max_relative_difference(gradient, file.values("grad." + weight)), bound) << weight;
    }
  }
}

class DenseHeadGolden : public ::testing::TestWithParam<DType> {};

TEST_P(DenseHeadGolden, AgreesWithTheNumpyOracle) {
  const DType dtype = GetParam();
  const GoldenFile file = golden::read_golden_file("dense_head");
  const ModelConfig config = golden::make_model_config(file);
  const LayerWeights weights = golden_weights(file, config, dtype);
  const Tensor norm = golden_tensor(file, "norm.weight", dtype);
  const Tensor lm_head = golden_tensor(file, "lm_head.weight", dtype);
  const auto targets = integers(file.values("targets"));
  RankContext ctx({});
  ctx.memory().poison = true;
  FfnSaved saved;
  FfnGradients gradients;
  const Tensor y = ffn_forward(ctx, {config, weights}, golden_tensor(file, "x", dtype), {}, saved);
  const DType wide = statistic_dtype(dtype);
  const HeadGradients head{.dx = ctx.empty("dy", MemoryClass::workspace, dtype, y.shape()),
                           .dnorm = ctx.empty("dnorm", MemoryClass::gradient, wide, norm.shape()),
                           .dlm_head = ctx.zeros("dlm_head", MemoryClass::gradient, wide, lm_head.shape())};
  head_loss_and_gradients(ctx, {config, norm, lm_head}, y, targets, 1, head, 4);
  const auto losses = head_token_losses(ctx, {config, norm, lm_head}, y, targets);
  const Tensor dx = ffn_backward(ctx, {config, weights}, std::move(saved), head.dx, gradients);
  const double bound = golden_bound(dtype);
  EXPECT_LE(max_relative_difference(values_of(y), file.values("y")), bound);
  EXPECT_LE(max_relative_difference(losses, file.values("losses")), bound);
  EXPECT_LE(max_relative_difference(values_of(head.dx), file.values("dy")), bound);
  EXPECT_LE(max_relative_difference(values_of(dx), file.values("dx")), bound);
  EXPECT_LE(max_relative_difference(values_of(head.dnorm), file.values("grad.norm.weight")), bound);
  EXPECT_LE(max_relative_difference(values_of(head.dlm_head), file.values("grad.lm_head.weight")), bound);
  for_each_ffn_gradient(gradients, [&](const std::string& weight, const Tensor& gradient) {
    EXPECT_LE(max_relative_difference(values_of(gradient), file.values("grad." + weight)), bound) << weight;
  });
}

INSTANTIATE_TEST_SUITE_P(DTypes, DenseHeadGolden, ::testing::Values(DType::f64, DType::f32, DType::bf16));

TEST(HeadReferenceGolden, AgreesWithTheNumpyOracle) {
  const GoldenFile file = golden::read_golden_file("dense_head");
  const auto result =
      head_reference(golden::make_model_config(file), file.values("norm.weight"), file.values("lm_head.weight"),
                     file.values("y"), integers(file.values("targets")), 1);
  const double bound = ffn_bound(DType::f64);
  EXPECT_LE(max_relative_difference(result.losses, file.values("losses")), bound);
  EXPECT_LE(max_relative_difference(result.logits, file.values("logits")), bound);
  EXPECT_LE(max_relative_difference(result.dx, file.values("dy")), bound);
  EXPECT_LE(max_relative_difference(result.dlm_head, file.values("grad.lm_head.weight")), bound);
}

}  // namespace
}  // namespace isomer
