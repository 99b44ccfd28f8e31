// The fast path (project, up-project, core, output; forward and backward) against the NumPy golden files, which share
// no code with it, and its gradients against finite differences.
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

constexpr std::array kGoldenFiles = {"v2_lite",    "v3",      "kimi_k2",   "glm",   "minicpm3",
                                     "no_kv_norm", "no_rope", "unrotated", "biases"};
constexpr std::array kLayouts = {"explicit", "explicit-shared-rope", "laga", "laga:v=view",
                                 "absorbed", "absorbed-two-product"};

class MlaStages : public ::testing::TestWithParam<std::tuple<const char*, const char*, AttentionCore, DType>> {};

TEST_P(MlaStages, AgreeWithTheNumpyOracle) {
  const auto [name, layout, core, dtype] = GetParam();
  const GoldenFile file = golden::read_golden_file(name);
  const BlockProblem problem = golden_problem(file, dtype, core);
  const auto [run, shown] = run_layout(problem, golden_data(file, problem), layout);
  const double bound = bound_of(dtype, file);
  const auto expect_golden = [&](const std::string& what, const std::vector<double>& actual, const std::string& key) {
    EXPECT_LT(max_relative_difference(actual, file.values(key)), bound) << what;
  };
  expect_golden("q", shown.at("q"), "intermediate.q");
  expect_golden("latent", shown.at("latent"), "intermediate.latent");
  if (!std::string_view(layout).starts_with("absorbed")) {
    expect_golden("core output", shown.at("core output"), "intermediate.attention");
  }
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

std::string golden_case_name(const ::testing::TestParamInfo<MlaStages::ParamType>& info) {
  const auto& [file, layout, core, dtype] = info.param;
  std::string name = fmt::format("{}_{}_{}_{}", file, layout, name_of(core), name_of(dtype));
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Golden, MlaStages,
                         ::testing::Combine(::testing::ValuesIn(kGoldenFiles), ::testing::ValuesIn(kLayouts),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16)),
                         golden_case_name);

// What a wrong scale, layout, position or set of longrope factors does must exceed the float64 and the float32 bound by
// far, or the files prove nothing about the fast path.
TEST(MlaStages, AWrongConfigurationIsSeen) {
  const auto error_of = [](const char* name, auto&& change) {
    const GoldenFile file = golden::read_golden_file(name);
    BlockProblem problem = golden_problem(file, DType::f64, AttentionCore::fused);
    change(problem);
    const auto outcome = run_layout(problem, golden_data(file, problem), "laga");
    return max_relative_difference(values_of(outcome.run.y), file.values("y"));
  };
  EXPECT_GT(error_of("v3", [](BlockProblem& p) { p.config.rope.interleave = false; }), 1e-2);
  EXPECT_GT(error_of("v3", [](BlockProblem& p) { p.config.rope.mscale_all_dim = 0; }), 1e-2);
  EXPECT_GT(error_of("v3", [](BlockProblem& p) { p.config.rms_norm_eps = ModelConfig::kInnerNormEps; }), 1e-7);
  EXPECT_GT(error_of("unrotated", [](BlockProblem& p) { p.config.rope.rotate = true; }), 1e-4);
  // Only distances between positions matter to y, but longrope's divisors depend on where the run ends.
  EXPECT_GT(error_of("minicpm3", [](BlockProblem& p) { p.first_position = 0; }), 1e-4);
}

// scale_depth multiplies the branch and nothing else: y − x, dx − dy and the weights' gradients are the golden ones
// times scale_depth/√layers.
TEST(MlaStages, ScaleDepthMultipliesTheBranch) {
  const GoldenFile file = golden::read_golden_file("minicpm3");
  BlockProblem problem = golden_problem(file, DType::f64, AttentionCore::fused);
  problem.config.scale_depth = 1.4;
  problem.config.num_hidden_layers = 4;
  const auto scaled = [](std::vector<double> values, const std::vector<double>& residual) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = residual[i] + 0.7 * (values[i] - residual[i]);
    return values;
  };
  const double bound = bound_of(DType::f64, file);
  for (const char* layout : {"explicit", "absorbed", "laga"}) {
    const auto [run, shown] = run_layout(problem, golden_data(file, problem), layout);
    EXPECT_LT(max_relative_difference(values_of(run.y), scaled(file.values("y"), file.values("x"))), bound) << layout;
    EXPECT_LT(max_relative_difference(values_of(run.dx), scaled(file.values("dx"), file.values("dy"))), bound);
    run.gradients.for_each([&](std::string_view weight, const Tensor& gradient) {
      const auto& plain = file.values("grad." + std::string(weight));
      EXPECT_LT(max_relative_difference(values_of(gradient), scaled(plain, std::vector<double>(plain.size()))), bound)
          << weight;
    });
  }
}

/// Every optional part, dimensions that differ from each other, in float64.
DifferenceCase difference_case() {
  DifferenceCase c;
  ModelConfig& config = c.problem.config;
  config.name = "differences";
  config.hidden_size = 20;
  config.num_attention_heads = config.num_key_value_heads = 4;
  config.q_lora_rank = 14;
  config.kv_lora_rank = 12;
  config.qk_nope_head_dim = 6;
  config.qk_rope_head_dim = 4;
  config.v_head_dim = 10;
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

class MlaDerivatives : public ::testing::TestWithParam<std::tuple<const char*, AttentionCore, int>> {};

TEST_P(MlaDerivatives, GradientsAreTheDerivatives) {
  DifferenceCase c = difference_case();
  c.problem.core = std::get<1>(GetParam());
  testing::expect_derivatives(c, std::get<0>(GetParam()), std::get<2>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Grid, MlaDerivatives,
                         ::testing::Combine(::testing::Values("explicit", "explicit-shared-rope", "laga", "absorbed",
                                                              "absorbed-two-product"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(1, 2)));

}  // namespace
}  // namespace isomer
