// SwiGLU with its norm and residual against the float64 reference, and the reference against finite differences.
#include <gtest/gtest.h>

#include "layers/ffn_fixture.h"

namespace isomer {
namespace {

using namespace testing;

struct DenseCase {
  std::int64_t tokens, hidden, width;
};

class Swiglu : public ::testing::TestWithParam<std::tuple<DenseCase, DType>> {};

TEST_P(Swiglu, AgreesWithTheReference) {
  const auto& [shape, dtype] = GetParam();
  const ModelConfig config = dense_config(shape.hidden, shape.width);
  const LayerWeights weights = make_ffn_weights(config, dtype);
  const Shape rows{shape.tokens, shape.hidden};
  const Tensor x = tensor_of(noise_values(50, num_elements(rows)), dtype, rows);
  const Tensor dy = tensor_of(noise_values(51, num_elements(rows)), dtype, rows);
  const auto expected = ffn_reference(config, widened_ffn_weights(weights), values_of(x), values_of(dy));
  const FfnOutcome outcome = run_ffn(config, weights, x, dy);
  if (shape.tokens == 0) {
    for_each_ffn_gradient(outcome.gradients, [](const std::string& name, const Tensor& gradient) {
      EXPECT_EQ(max_magnitude(values_of(gradient)), 0) << name;
    });
    return;
  }
  expect_ffn(outcome, expected, ffn_bound(dtype));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Swiglu,
                         ::testing::Combine(::testing::Values(DenseCase{0, 20, 37}, DenseCase{1, 20, 37},
                                                              DenseCase{7, 3, 1}, DenseCase{65, 20, 37},
                                                              DenseCase{130, 48, 129}),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16)));

// MiniCPM3's scale_depth: the branch counts scale_depth/√layers times, in both directions.
TEST(SwigluLayer, ResidualScale) {
  ModelConfig config = dense_config();
  config.scale_depth = 1.4;
  EXPECT_DOUBLE_EQ(config.residual_scale(), 0.7);
  const LayerWeights weights = make_ffn_weights(config, DType::f64);
  const Tensor x = tensor_of(noise_values(50, 9 * 20), DType::f64, {9, 20});
  const Tensor dy = tensor_of(noise_values(51, 9 * 20), DType::f64, {9, 20});
  const auto expected = ffn_reference(config, widened_ffn_weights(weights), values_of(x), values_of(dy));
  expect_ffn(run_ffn(config, weights, x, dy), expected, ffn_bound(DType::f64));
}

TEST(SwigluLayer, GradientsThatAreThereAreAddedTo) {
  const ModelConfig config = dense_config();
  const LayerWeights weights = make_ffn_weights(config, DType::f64);
  const Tensor x = tensor_of(noise_values(50, 9 * 20), DType::f64, {9, 20});
  const Tensor dy = tensor_of(noise_values(51, 9 * 20), DType::f64, {9, 20});
  RankContext ctx({});
  FfnGradients gradients;
  for (int i = 0; i < 2; ++i) {
    FfnSaved saved;
    ffn_forward(ctx, {config, weights}, x, {}, saved);
    ffn_backward(ctx, {config, weights}, std::move(saved), dy, gradients);
  }
  const auto expected = ffn_reference(config, widened_ffn_weights(weights), values_of(x), values_of(dy));
  for_each_ffn_gradient(gradients, [&](const std::string& name, const Tensor& gradient) {
    std::vector<double> twice = expected.gradients.at(name);
    for (double& value : twice) value *= 2;
    EXPECT_LE(max_relative_difference(values_of(gradient), twice), ffn_bound(DType::f64)) << name;
  });
}

TEST(SwigluLayer, ThreadsChangeNoBit) {
  const ModelConfig config = dense_config(96, 200);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const LayerWeights weights = make_ffn_weights(config, dtype);
    const Tensor x = tensor_of(noise_values(50, 700 * 96), dtype, {700, 96});
    const FfnOutcome one = run_ffn(config, weights, x, x), three = run_ffn(config, weights, x, x, {}, 3);
    EXPECT_EQ(values_of(one.y), values_of(three.y));
    EXPECT_EQ(values_of(one.dx), values_of(three.dx));
    std::map<std::string, std::vector<double>> gradients;
    for_each_ffn_gradient(one.gradients, [&](const auto& name, const Tensor& g) { gradients[name] = values_of(g); });
    for_each_ffn_gradient(three.gradients,
                          [&](const auto& name, const Tensor& g) { EXPECT_EQ(gradients[name], values_of(g)) << name; });
  }
}

/// Σ y·dy of the reference with one weight or x moved along `direction`, fourth-order central differences.
double difference_quotient(const ModelConfig& config, const FfnReferenceWeights& w, std::vector<double>& x,
                           const std::vector<double>& dy, std::vector<double>& moved,
                           const std::vector<std::int32_t>& experts, const std::vector<double>& direction) {
  const std::vector<double> before = moved;
  const auto loss_at = [&](double step) {
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] = before[i] + step * direction[i];
    const std::vector<double> y = ffn_reference(config, w, x, {}, experts).y;
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) loss += y[i] * dy[i];
    return loss;
  };
  constexpr double kStep = 1e-3;
  const double quotient =
      (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
  moved = before;
  return quotient;
}

class ReferenceDerivatives : public ::testing::TestWithParam<int> {};

TEST_P(ReferenceDerivatives, GradientsAreTheDerivatives) {
  const int kind = GetParam();
  ModelConfig config = kind == 0 ? dense_config() : moe_config(static_cast<RouterKind>(kind - 1));
  config.scale_depth = 1.2;
  FfnReferenceWeights w = widened_ffn_weights(make_ffn_weights(config, DType::f64));
  std::vector<double> x = noise_values(60, 5 * 20);
  const std::vector<double> dy = noise_values(61, 5 * 20);
  const auto result = ffn_reference(config, w, x, dy);
  std::map<std::string, std::vector<double>*> tensors{{"post_attention_layernorm.weight", &w.norm}};
  const auto enter = [&](const std::string& prefix, MlpReferenceWeights& mlp) {
    if (mlp.gate.empty()) return;
    tensors[prefix + ".gate_proj.weight"] = &mlp.gate;
    tensors[prefix + ".up_proj.weight"] = &mlp.up;
    tensors[prefix + ".down_proj.weight"] = &mlp.down;
  };
  enter("mlp", w.mlp);
  enter("mlp.shared_experts", w.shared);
  for (std::size_t e = 0; e < w.experts.size(); ++e) enter(fmt::format("mlp.experts.{}", e), w.experts[e]);
  if (!w.router.empty()) tensors["mlp.gate.weight"] = &w.router;
  ASSERT_EQ(tensors.size(), result.gradients.size());
  tensors["x"] = &x;
  std::uint64_t seed = 70;
  for (const auto& [name, tensor] : tensors) {
    const std::vector<double>& gradient = name == "x" ? result.dx : result.gradients.at(name);
    const auto direction = noise_values(++seed, static_cast<std::int64_t>(tensor->size()),
                                        1 / std::sqrt(static_cast<double>(tensor->size())));
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    // Truncation step⁴ = 1e-12 times a fifth derivative, cancellation ε/step = 1e-13 of a loss of some ten.
    EXPECT_NEAR(difference_quotient(config, w, x, dy, *tensor, result.experts, direction), expected,
                1e-8 * (1 + max_magnitude(gradient)))
        << name;
  }
}

INSTANTIATE_TEST_SUITE_P(DenseAndRouters, ReferenceDerivatives, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace isomer
