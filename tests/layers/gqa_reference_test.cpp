#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "golden/golden_file.h"
#include "layers/reference/attention_block.h"
#include "layers/reference/gqa_block.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using testing::max_relative_difference;
using testing::noise_values;

using NamedValues = std::map<std::string, std::vector<double>>;

constexpr double kEpsilon = 0x1p-52;

/// As in mla_reference_test.cpp: sums and an exp cost some hundred ε, an angle position · ε.
double tolerance(std::int64_t last_position) { return kEpsilon * (2048 + 16 * static_cast<double>(last_position)); }

NamedValues golden_weights(const GoldenFile& file, const ModelConfig& config) {
  NamedValues weights;
  for (const GqaReferenceWeight& weight : gqa_reference_weights(config)) {
    const std::string name(weight.name);
    if (file.has(name)) weights[name] = file.values(name);
  }
  return weights;
}

GqaReferenceResult run_golden(const GoldenFile& file, const ModelConfig& config, int num_threads = 2) {
  return gqa_block_reference(config,
                             {.weights = golden_weights(file, config),
                              .seq = file.seq(),
                              .batch = file.batch(),
                              .first_position = file.position_offset(),
                              .x = file.values("x"),
                              .dy = file.values("dy")},
                             num_threads);
}

class GqaReferenceGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(GqaReferenceGolden, AgreesWithTheNumpyOracle) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const GqaReferenceResult result = run_golden(file, config);
  const double bound = tolerance(file.position_offset() + file.seq());
  const auto expect_golden = [&](const std::vector<double>& actual, const std::string& name) {
    EXPECT_LT(max_relative_difference(actual, file.values(name)), bound) << name;
  };
  expect_golden(result.q, "intermediate.q");
  expect_golden(result.k, "intermediate.k_cached");
  expect_golden(result.v, "intermediate.v_cached");
  expect_golden(result.lse, "intermediate.lse");
  expect_golden(result.attention, "intermediate.attention");
  expect_golden(result.y, "y");
  expect_golden(result.dx, "dx");
  std::vector<std::string> expected_names, names;
  for (const auto& [name, tensor] : file.tensors) {
    if (name.starts_with("grad.")) expected_names.push_back(name.substr(5));
  }
  for (const auto& [name, gradient] : result.gradients) {
    names.push_back(name);
    expect_golden(gradient, "grad." + name);
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected_names));
}

TEST_P(GqaReferenceGolden, BitsDependNeitherOnThreadsNorOnTheBackward) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const GqaReferenceResult one = run_golden(file, config, 1);
  for (const int num_threads : {2, 3, 8}) {
    const GqaReferenceResult many = run_golden(file, config, num_threads);
    EXPECT_EQ(many.y, one.y);
    EXPECT_EQ(many.dx, one.dx);
    EXPECT_EQ(many.gradients, one.gradients);
  }
  const NamedValues weights = golden_weights(file, config);
  const AttentionReferenceResult forward = attention_block_reference(config,
                                                                     {.weights = weights,
                                                                      .seq = file.seq(),
                                                                      .batch = file.batch(),
                                                                      .first_position = file.position_offset(),
                                                                      .x = file.values("x"),
                                                                      .dy = {}},
                                                                     2);
  EXPECT_EQ(forward.y, one.y);
  EXPECT_TRUE(forward.dx.empty());
  EXPECT_TRUE(forward.gradients.empty());
}

INSTANTIATE_TEST_SUITE_P(Cases, GqaReferenceGolden, ::testing::Values("gqa_llama3", "gqa_biases_linear"),
                         [](const auto& test) { return std::string(test.param); });

// What a wrong layout, scaling or assignment of heads would do must exceed the tolerance by far.
TEST(GqaReference, GoldenFilesSeeWrongRopeAndGroups) {
  const GoldenFile file = golden::read_golden_file("gqa_llama3");
  const ModelConfig right = golden::make_model_config(file);
  const auto error_of = [&](const ModelConfig& config) {
    return max_relative_difference(run_golden(file, config).y, file.values("y"));
  };
  ModelConfig interleaved = right, unscaled = right, other_eps = right;
  interleaved.rope.interleave = true;
  unscaled.rope.scaling = RopeScalingKind::none;
  other_eps.rms_norm_eps = 1e-6;
  EXPECT_GT(error_of(interleaved), 1e-2);
  EXPECT_GT(error_of(unscaled), 1e-4);
  EXPECT_GT(error_of(other_eps), 1e-7);
}

/// Several query blocks, three query heads on each of two KV heads, all biases.
struct RandomCase {
  ModelConfig config;
  NamedValues weights;
  std::int64_t seq = 135, batch = 2;
  std::vector<double> x, dy;

  GqaReferenceResult run(const std::vector<double>& dy_given) const {
    return gqa_block_reference(
        config, {.weights = weights, .seq = seq, .batch = batch, .first_position = 900, .x = x, .dy = dy_given}, 2);
  }
};

RandomCase random_case() {
  RandomCase c;
  c.config.name = "random";
  c.config.attention = AttentionKind::gqa;
  c.config.hidden_size = 20;
  c.config.num_attention_heads = 6;
  c.config.num_key_value_heads = 2;
  c.config.head_dim = 10;
  c.config.rope.interleave = false;
  std::uint64_t seed = 1;
  for (const GqaReferenceWeight& weight : gqa_reference_weights(c.config)) {
    const bool is_vector = weight.shape.size() == 1;
    const double deviation = is_vector ? 0.3 : 1 / std::sqrt(static_cast<double>(weight.shape[1]));
    const double mean = is_vector && !weight.optional ? 1 : 0;
    c.weights[std::string(weight.name)] = noise_values(++seed, num_elements(weight.shape), deviation, mean);
  }
  c.x = noise_values(++seed, c.seq * c.batch * c.config.hidden_size);
  c.dy = noise_values(++seed, c.seq * c.batch * c.config.hidden_size);
  return c;
}

TEST(GqaReference, GradientsAreTheDerivatives) {
  RandomCase c = random_case();
  const GqaReferenceResult result = c.run(c.dy);
  std::uint64_t seed = 100;
  const auto expect_derivative = [&](const std::string& name, std::vector<double>& values,
                                     const std::vector<double>& gradient) {
    const auto size = static_cast<std::int64_t>(values.size());
    const auto direction = noise_values(++seed, size, 1 / std::sqrt(static_cast<double>(size)));
    const std::vector<double> saved = values;
    const auto loss_at = [&](double step) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = saved[i] + step * direction[i];
      const std::vector<double> y = c.run({}).y;
      double loss = 0;
      for (std::size_t i = 0; i < y.size(); ++i) loss += y[i] * c.dy[i];
      return loss;
    };
    constexpr double kStep = 1e-3;
    const double quotient =
        (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
    values = saved;
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    // Truncation step⁴ = 1e-12 times a fifth derivative, cancellation ε / step = 1e-13 of a loss of some hundreds.
    EXPECT_NEAR(quotient, expected, 1e-8 * (1 + testing::max_magnitude(gradient))) << name;
  };
  expect_derivative("x", c.x, result.dx);
  for (auto& [name, values] : c.weights) expect_derivative(name, values, result.gradients.at(name));
}

TEST(GqaReference, TokensDoNotSeeTheFuture) {
  RandomCase c = random_case();
  const GqaReferenceResult before = c.run({});
  const std::size_t row = 20 * 2;  // elements of a position: D · batch
  for (std::size_t i = 130 * row; i < c.x.size(); ++i) c.x[i] = -c.x[i];
  const GqaReferenceResult after = c.run({});
  const auto changed = std::mismatch(before.y.begin(), before.y.end(), after.y.begin()).first - before.y.begin();
  EXPECT_EQ(static_cast<std::size_t>(changed) / row, 130u);
}

TEST(GqaReference, NamesTheWeightOfAWrongSizeOrWithoutAPlace) {
  const auto message_of = [](const RandomCase& c) -> std::string {
    try {
      attention_block_reference(c.config, {.weights = c.weights, .seq = c.seq, .batch = c.batch, .x = c.x, .dy = c.dy},
                                1);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  RandomCase c = random_case();
  c.weights.at("self_attn.k_proj.weight").pop_back();
  EXPECT_THAT(message_of(c), ::testing::HasSubstr("self_attn.k_proj.weight"));
  c = random_case();
  c.weights.erase("self_attn.v_proj.weight");
  EXPECT_THAT(message_of(c), ::testing::HasSubstr("self_attn.v_proj.weight"));
  c = random_case();
  c.weights["self_attn.kv_b_proj.weight"] = {1};
  EXPECT_THAT(message_of(c), ::testing::HasSubstr("self_attn.kv_b_proj.weight"));
  c = random_case();
  c.seq = 5;
  EXPECT_THAT(message_of(c), ::testing::HasSubstr("x has"));
}

}  // namespace
}  // namespace isomer
