// The fast path (project, up-project, core, output; forward and backward) against the NumPy golden files, which share
// no code with it, and its gradients against finite differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "golden/golden_file.h"
#include "study/block_run.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using testing::max_relative_difference;
using testing::noise_values;
using testing::tensor_of;
using testing::values_of;

constexpr std::array kGoldenFiles = {"v2_lite",    "v3",      "kimi_k2",   "glm",   "minicpm3",
                                     "no_kv_norm", "no_rope", "unrotated", "biases"};
constexpr std::array kLayouts = {"explicit", "explicit-shared-rope", "laga", "laga:v=view",
                                 "absorbed", "absorbed-two-product"};

using Intermediates = std::map<std::string, std::vector<double>>;

struct Outcome {
  BlockRun run;
  Intermediates shown;  // of rank 0
};

Outcome run_layout(const BlockProblem& problem, const BlockData& data, const std::string& layout, int num_ranks = 1) {
  Outcome outcome;
  BlockRunOptions options;
  options.group.num_ranks = num_ranks;
  options.group.threads_per_rank = 1;
  options.group.timeout_s = 60;
  options.repetitions = 1;
  options.poison_memory = true;
  options.dump = [&](int rank, const std::string& name, const Tensor& tensor) {
    if (rank == 0) outcome.shown[name] = values_of(tensor);
  };
  outcome.run = run_block(problem, data, parse_layout(layout), options);
  return outcome;
}

BlockProblem golden_problem(const GoldenFile& file, DType dtype, AttentionCore core) {
  return {.config = golden::make_model_config(file),
          .dtype = dtype,
          .seq = file.seq(),
          .batch = file.batch(),
          .first_position = file.position_offset(),
          .core = core};
}

BlockData golden_data(const GoldenFile& file, const BlockProblem& problem) {
  BlockData data;
  data.weights.for_each_slot([&](std::string_view name, Tensor& tensor) {
    const std::string key(name);
    if (!file.has(key)) return;
    tensor = tensor_of(file.values(key), problem.dtype, file.tensors.at(key).shape);
  });
  const Shape rows{problem.seq * problem.batch, problem.config.hidden_size};
  data.x = tensor_of(file.values("x"), problem.dtype, rows);
  data.dy = tensor_of(file.values("dy"), problem.dtype, rows);
  return data;
}

/// [h, rows] as [rows, h].
std::vector<double> transposed(const std::vector<double>& values, std::int64_t h) {
  std::vector<double> result(values.size());
  const std::size_t heads = static_cast<std::size_t>(h), rows = values.size() / heads;
  for (std::size_t i = 0; i < heads; ++i) {
    for (std::size_t row = 0; row < rows; ++row) result[row * heads + i] = values[i * rows + row];
  }
  return result;
}

/// float64: sums of a hundred terms and an exp of logits around 10 cost some hundred ε; an angle costs position · ε,
/// which the logits amplify (mla_reference_test.cpp). float32: angles are float64, so only the sums and the exp
/// remain. bfloat16: weights, inputs and every tensor between stages round to 8 bits, half an ε each, about ten deep;
/// logits of 10 turn that into tens of ε of a probability.
double bound_of(DType dtype, const GoldenFile& file) {
  const auto last_position = static_cast<double>(file.position_offset() + file.seq());
  if (dtype == DType::f64) return epsilon_of(dtype) * (512 + 4 * last_position);
  return dtype == DType::f32 ? 64 * epsilon_of(dtype) : 16 * epsilon_of(dtype);
}

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
struct DifferenceCase {
  BlockProblem problem;
  BlockData data;
};

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

/// Fourth-order central differences of Σ y·dy along `direction` of one tensor.
double difference_quotient(const DifferenceCase& c, const Tensor& tensor, const std::vector<double>& direction,
                           const std::string& layout, int num_ranks) {
  const std::vector<double> saved = values_of(tensor), dy = values_of(c.data.dy);
  const auto loss_at = [&](double step) {
    std::vector<double> moved = saved;
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * direction[i];
    testing::set_values(tensor, moved);
    const std::vector<double> y = values_of(run_layout(c.problem, c.data, layout, num_ranks).run.y);
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) loss += y[i] * dy[i];
    return loss;
  };
  constexpr double kStep = 1e-3;
  const double quotient =
      (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
  testing::set_values(tensor, saved);
  return quotient;
}

class MlaDerivatives : public ::testing::TestWithParam<std::tuple<const char*, AttentionCore, int>> {};

TEST_P(MlaDerivatives, GradientsAreTheDerivatives) {
  const std::string layout = std::get<0>(GetParam());
  const int num_ranks = std::get<2>(GetParam());
  DifferenceCase c = difference_case();
  c.problem.core = std::get<1>(GetParam());
  const BlockRun run = run_layout(c.problem, c.data, layout, num_ranks).run;
  std::map<std::string, Tensor> gradients{{"x", run.dx}};
  run.gradients.for_each([&](std::string_view name, const Tensor& g) { gradients[std::string(name)] = g; });
  std::uint64_t seed = 20;
  const auto expect_derivative = [&](const std::string& name, const Tensor& tensor) {
    ASSERT_TRUE(gradients.contains(name)) << name;
    const std::vector<double> gradient = values_of(gradients.at(name));
    const auto direction = noise_values(++seed, tensor.numel(), 1 / std::sqrt(static_cast<double>(tensor.numel())));
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    // Truncation step⁴ = 1e-12 times a fifth derivative; cancellation ε/step = 1e-13 of a loss of some hundreds.
    EXPECT_NEAR(difference_quotient(c, tensor, direction, layout, num_ranks), expected,
                1e-8 * (1 + testing::max_magnitude(gradient)))
        << name;
  };
  expect_derivative("x", c.data.x);
  c.data.weights.for_each(
      [&](std::string_view name, const Tensor& tensor) { expect_derivative(std::string(name), tensor); });
}

INSTANTIATE_TEST_SUITE_P(Grid, MlaDerivatives,
                         ::testing::Combine(::testing::Values("explicit", "explicit-shared-rope", "laga", "absorbed",
                                                              "absorbed-two-product"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(1, 2)));

}  // namespace
}  // namespace isomer
