// Grouped-query attention on the fast path (project, core, output; forward and backward) against the NumPy golden
// files, which share no code with it, and its gradients against finite differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "layers/stage_runs.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using testing::bound_of;
using testing::DifferenceCase;
using testing::golden_data;
using testing::golden_problem;
using testing::max_relative_difference;
using testing::noise_values;
using testing::run_layout;
using testing::tensor_of;
using testing::transposed;
using testing::values_of;

class GqaStages : public ::testing::TestWithParam<std::tuple<const char*, AttentionCore, DType>> {};

TEST_P(GqaStages, AgreeWithTheNumpyOracle) {
  const auto [name, core, dtype] = GetParam();
  const GoldenFile file = golden::read_golden_file(name);
  const BlockProblem problem = golden_problem(file, dtype, core);
  const auto [run, shown] = run_layout(problem, golden_data(file, problem), "explicit");
  const double bound = bound_of(dtype, file);
  const auto expect_golden = [&](const std::string& what, const std::vector<double>& actual, const std::string& key) {
    EXPECT_LT(max_relative_difference(actual, file.values(key)), bound) << what;
  };
  expect_golden("q", shown.at("q"), "intermediate.q");
  expect_golden("k", shown.at("k"), "intermediate.k_cached");
  expect_golden("v", shown.at("v"), "intermediate.v_cached");
  expect_golden("core output", shown.at("core output"), "intermediate.attention");
  if (core == AttentionCore::fused) {
    expect_golden("lse", transposed(shown.at("core lse"), problem.config.num_attention_heads), "intermediate.lse");
  }
  expect_golden("y", values_of(run.y), "y");
  expect_golden("dx", values_of(run.dx), "dx");
  std::vector<std::string> expected_names, names;
  for (const auto& [key, tensor] : file.tensors) {
    if (key.starts_with("grad.")) expected_names.push_back(key.substr(5));
  }
  run.gradients.for_each([&](std::string_view weight, const Tensor& gradient) {
    names.emplace_back(weight);
    EXPECT_EQ(gradient.shape(), file.tensors.at("grad." + names.back()).shape) << weight;
    expect_golden(names.back(), values_of(gradient), "grad." + names.back());
  });
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected_names));
}

INSTANTIATE_TEST_SUITE_P(Golden, GqaStages,
                         ::testing::Combine(::testing::Values("gqa_llama3", "gqa_biases_linear"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16)),
                         [](const auto& test) {
                           return fmt::format("{}_{}_{}", std::get<0>(test.param), name_of(std::get<1>(test.param)),
                                              name_of(std::get<2>(test.param)));
                         });

// What a wrong layout, scaling or position does must exceed the float64 and the float32 bound by far.
TEST(GqaStages, AWrongConfigurationIsSeen) {
  const auto error_of = [](auto&& change) {
    const GoldenFile file = golden::read_golden_file("gqa_llama3");
    BlockProblem problem = golden_problem(file, DType::f64, AttentionCore::fused);
    change(problem);
    const auto outcome = run_layout(problem, golden_data(file, problem), "explicit");
    return max_relative_difference(values_of(outcome.run.y), file.values("y"));
  };
  EXPECT_GT(error_of([](BlockProblem& p) { p.config.rope.interleave = true; }), 1e-2);
  EXPECT_GT(error_of([](BlockProblem& p) { p.config.rope.scaling = RopeScalingKind::none; }), 1e-4);
  EXPECT_GT(error_of([](BlockProblem& p) { p.config.rms_norm_eps = 1e-6; }), 1e-7);
}

/// All biases, rope in halves, dimensions that differ from each other, in float64.
DifferenceCase difference_case() {
  DifferenceCase c;
  ModelConfig& config = c.problem.config;
  config.name = "differences";
  config.model_type = "llama";
  config.attention = AttentionKind::gqa;
  config.hidden_size = 20;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 3;  // on two ranks: copies, several a rank
  config.head_dim = 10;
  config.rope.interleave = false;
  config.attention_bias = true;
  config.num_hidden_layers = 1;
  c.problem.dtype = DType::f64;
  c.problem.seq = 9;  // uneven over 2 ranks
  c.problem.batch = 2;
  c.problem.first_position = 300;
  c.data.weights = seeded_attention_weights(config, 5, DType::f64);
  const Shape rows{c.problem.seq * c.problem.batch, config.hidden_size};
  c.data.x = tensor_of(noise_values(1, num_elements(rows)), DType::f64, rows);
  c.data.dy = tensor_of(noise_values(2, num_elements(rows)), DType::f64, rows);
  return c;
}

class GqaDerivatives : public ::testing::TestWithParam<std::tuple<const char*, AttentionCore, int>> {};

TEST_P(GqaDerivatives, GradientsAreTheDerivatives) {
  DifferenceCase c = difference_case();
  c.problem.core = std::get<1>(GetParam());
  testing::expect_derivatives(c, std::get<0>(GetParam()), std::get<2>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Grid, GqaDerivatives,
                         ::testing::Combine(::testing::Values("explicit"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(1, 2, 6)));
// What passes round is merged part by part, which an eager core, with its whole score matrices, can't be.
INSTANTIATE_TEST_SUITE_P(Ring, GqaDerivatives,
                         ::testing::Combine(::testing::Values("ring"), ::testing::Values(AttentionCore::fused),
                                            ::testing::Values(1, 2, 6)));

}  // namespace
}  // namespace isomer
