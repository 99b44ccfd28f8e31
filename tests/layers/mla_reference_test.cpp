#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "golden/golden_file.h"
#include "layers/reference/mla_block.h"
#include "layers/rope.h"

namespace isomer {
namespace {

using golden::GoldenFile;

constexpr double kEpsilon = 0x1p-52;

/// Largest difference, relative to the largest expected value; infinite for another size or for a NaN.
double max_relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double error = 0, largest = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    error = std::max(error, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0 ? error / largest : error;
}

/// Sums of a hundred terms and an exp of logits around 10 cost some hundred ε. An angle is position · frequency, so the
/// last bit of a frequency costs position · ε, which the logits amplify once more.
double tolerance(std::int64_t last_position) { return kEpsilon * (2048 + 16 * static_cast<double>(last_position)); }

MlaReferenceWeights golden_weights(const GoldenFile& file, const ModelConfig& config) {
  MlaReferenceWeights weights;
  for (const MlaReferenceWeight& weight : mla_reference_weights(config)) {
    if (file.has(std::string(weight.name))) weights.*weight.member = file.values(std::string(weight.name));
  }
  return weights;
}

MlaReferenceResult run_golden(const GoldenFile& file, const ModelConfig& config) {
  return mla_block_reference(config, golden_weights(file, config), file.seq(), file.batch(), file.position_offset(),
                             file.values("x"), file.values("dy"), 2);
}

// The branch alone is multiplied, by scale_depth/√layers.
TEST(MlaReference, ScaleDepth) {
  const GoldenFile file = golden::read_golden_file("minicpm3");
  ModelConfig config = golden::make_model_config(file);
  config.scale_depth = 1.4;
  config.num_hidden_layers = 4;
  const MlaReferenceResult result = run_golden(file, config);
  const double bound = tolerance(file.position_offset() + file.seq());
  const auto scaled = [](std::vector<double> values, const std::vector<double>& residual) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = residual[i] + 0.7 * (values[i] - residual[i]);
    return values;
  };
  EXPECT_LT(max_relative_error(result.y, scaled(file.values("y"), file.values("x"))), bound);
  EXPECT_LT(max_relative_error(result.dx, scaled(file.values("dx"), file.values("dy"))), bound);
  const auto& plain = file.values("grad.self_attn.o_proj.weight");
  EXPECT_LT(max_relative_error(result.gradients.at("self_attn.o_proj.weight"),
                               scaled(plain, std::vector<double>(plain.size()))),
            bound);
}

class MlaReferenceGolden : public testing::TestWithParam<const char*> {};

TEST_P(MlaReferenceGolden, AgreesWithTheNumpyOracle) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const MlaReferenceResult result = run_golden(file, config);
  const double bound = tolerance(file.position_offset() + file.seq());
  EXPECT_LT(max_relative_error(result.q, file.values("intermediate.q")), bound);
  EXPECT_LT(max_relative_error(result.latent, file.values("intermediate.latent")), bound);
  EXPECT_LT(max_relative_error(result.lse, file.values("intermediate.lse")), bound);
  EXPECT_LT(max_relative_error(result.attention, file.values("intermediate.attention")), bound);
  EXPECT_LT(max_relative_error(result.y, file.values("y")), bound);
  EXPECT_LT(max_relative_error(result.dx, file.values("dx")), bound);
  std::vector<std::string> expected_names, names;
  for (const auto& [name, tensor] : file.tensors) {
    if (name.starts_with("grad.")) expected_names.push_back(name.substr(5));
  }
  for (const auto& [name, gradient] : result.gradients) {
    names.push_back(name);
    EXPECT_LT(max_relative_error(gradient, file.values("grad." + name)), bound) << name;
  }
  EXPECT_THAT(names, testing::UnorderedElementsAreArray(expected_names));
}

TEST_P(MlaReferenceGolden, ForwardOnlyGivesTheSameBits) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const MlaReferenceResult forward = mla_block_reference(config, golden_weights(file, config), file.seq(), file.batch(),
                                                         file.position_offset(), file.values("x"), {}, 1);
  EXPECT_EQ(forward.y, run_golden(file, config).y);
  EXPECT_TRUE(forward.dx.empty());
  EXPECT_TRUE(forward.gradients.empty());
}

INSTANTIATE_TEST_SUITE_P(Cases, MlaReferenceGolden,
                         testing::Values("v2_lite", "v3", "kimi_k2", "glm", "minicpm3", "no_kv_norm", "no_rope",
                                         "unrotated", "biases"),
                         [](const auto& test) { return std::string(test.param); });

// What a wrong layout, scale or inner eps would do must exceed the tolerance by far, or the files prove nothing.
TEST(MlaReference, GoldenFilesSeeWrongRopeLayoutScaleAndEps) {
  const GoldenFile file = golden::read_golden_file("v3");
  const ModelConfig right = golden::make_model_config(file);
  const auto error_of = [&](const ModelConfig& config) {
    return max_relative_error(run_golden(file, config).y, file.values("y"));
  };
  ModelConfig halves = right, no_mscale = right, other_eps = right, other_ramp = right;
  halves.rope.interleave = false;
  no_mscale.rope.mscale = no_mscale.rope.mscale_all_dim = 0;
  other_eps.rms_norm_eps = ModelConfig::kInnerNormEps;
  other_ramp.rope.beta_fast = 1;
  EXPECT_GT(error_of(halves), 1e-2);
  EXPECT_GT(error_of(no_mscale), 1e-2);
  EXPECT_GT(error_of(other_eps), 1e-7);
  EXPECT_GT(error_of(other_ramp), 1e-4);
}

TEST(RopeGolden, TablesAgreeWithTheNumpyOracle) {
  const GoldenFile file = golden::read_golden_file("rope_tables");
  const auto tables = nlohmann::json::parse(file.metadata.at("tables"));
  ASSERT_EQ(tables.size(), 10u);
  for (const auto& [name, table] : tables.items()) {
    const auto positions = table.at("positions").get<std::vector<std::int64_t>>();
    const RopeTable actual = rope_table(golden::make_rope_config(table.at("config")), table.at("rope_dim"), positions,
                                        table.at("num_positions"));
    // Two roundings of an inverse frequency ≤ 1 make position · ε of an angle; magnitudes are below 1.5.
    const double bound = 3 * kEpsilon * (4 + static_cast<double>(positions.back()));
    EXPECT_LT(max_relative_error(actual.cos, file.values(name + ".cos")), bound) << name;
    EXPECT_LT(max_relative_error(actual.sin, file.values(name + ".sin")), bound) << name;
  }
}

/// A model without a golden file: sizes that are no multiple of a tile, several query blocks, biases.
struct RandomCase {
  ModelConfig config;
  MlaReferenceWeights weights;
  std::int64_t seq, batch;
  std::vector<double> x, dy;
};

std::vector<double> random_values(std::mt19937_64& generator, std::int64_t size, double deviation, double mean = 0) {
  std::normal_distribution<double> distribution(mean, deviation);
  std::vector<double> values(static_cast<std::size_t>(size));
  for (double& value : values) value = distribution(generator);
  return values;
}

RandomCase random_case(std::int64_t hidden, std::int64_t seq, std::int64_t batch) {
  RandomCase c{.seq = seq, .batch = batch};
  c.config.hidden_size = hidden;
  c.config.num_attention_heads = 3;
  c.config.q_lora_rank = 20;
  c.config.kv_lora_rank = 24;
  c.config.qk_nope_head_dim = 10;
  c.config.qk_rope_head_dim = 6;
  c.config.v_head_dim = 14;
  std::mt19937_64 generator(7);
  for (const MlaReferenceWeight& weight : mla_reference_weights(c.config)) {
    const bool is_norm = weight.shape.size() == 1 && !weight.optional;
    const double deviation = weight.shape.size() == 1 ? 0.3 : 1 / std::sqrt(static_cast<double>(weight.shape[1]));
    c.weights.*weight.member = random_values(generator, num_elements(weight.shape), deviation, is_norm ? 1 : 0);
  }
  for (double& value : c.weights.q_b_proj) value *= 3;
  c.x = random_values(generator, seq * batch * hidden, 1);
  c.dy = random_values(generator, seq * batch * hidden, 1);
  return c;
}

MlaReferenceResult run(const RandomCase& c, std::int64_t first_position, int num_threads) {
  return mla_block_reference(c.config, c.weights, c.seq, c.batch, first_position, c.x, c.dy, num_threads);
}

TEST(MlaReference, DoesNotDependOnTheNumberOfThreads) {
  const RandomCase c = random_case(520, 150, 2);  // two column tiles, two query blocks
  const MlaReferenceResult one = run(c, 4000, 1);
  for (const int num_threads : {2, 3, 8}) {
    const MlaReferenceResult many = run(c, 4000, num_threads);
    EXPECT_EQ(many.y, one.y);
    EXPECT_EQ(many.lse, one.lse);
    EXPECT_EQ(many.dx, one.dx);
    EXPECT_EQ(many.gradients, one.gradients);
  }
}

TEST(MlaReference, SequencesOfABatchDoNotSeeEachOther) {
  const RandomCase both = random_case(32, 40, 2);
  const MlaReferenceResult together = run(both, 100, 2);
  for (std::int64_t b = 0; b < 2; ++b) {
    RandomCase alone = both;
    alone.batch = 1;
    const auto rows_of = [&](const std::vector<double>& values) {
      std::vector<double> rows;
      for (std::int64_t row = b; row < 80; row += 2) {
        rows.insert(rows.end(), values.begin() + row * 32, values.begin() + (row + 1) * 32);
      }
      return rows;
    };
    alone.x = rows_of(both.x);
    alone.dy = rows_of(both.dy);
    const MlaReferenceResult result = run(alone, 100, 1);
    EXPECT_LT(max_relative_error(result.y, rows_of(together.y)), 512 * kEpsilon);  // other shapes, other sum orders
    EXPECT_LT(max_relative_error(result.dx, rows_of(together.dx)), 512 * kEpsilon);
  }
}

TEST(MlaReference, OnlyDistancesBetweenPositionsMatter) {
  RandomCase c = random_case(32, 140, 1);
  const MlaReferenceResult near = run(c, 0, 2);
  const MlaReferenceResult far = run(c, 100000, 2);
  EXPECT_LT(max_relative_error(far.y, near.y), tolerance(100140));
  EXPECT_LT(max_relative_error(far.dx, near.dx), tolerance(100140));
  EXPECT_GT(max_relative_error(far.q, near.q), 0.1);
  c.config.rope.rotate = false;
  EXPECT_GT(max_relative_error(run(c, 0, 2).y, near.y), 1e-2);
}

TEST(MlaReference, TokensDoNotSeeTheFuture) {
  RandomCase c = random_case(32, 140, 1);
  const MlaReferenceResult before = run(c, 50, 2);
  for (std::size_t i = 130 * 32; i < c.x.size(); ++i) c.x[i] = -c.x[i];
  const MlaReferenceResult after = run(c, 50, 2);
  const auto changed = std::mismatch(before.y.begin(), before.y.end(), after.y.begin()).first - before.y.begin();
  EXPECT_GE(changed, 130 * 32);
  EXPECT_LT(changed, 131 * 32);
}

/// Central differences of Σ y · dy along a random direction over all elements of `values`.
double difference_quotient(RandomCase& c, std::vector<double>& values, const std::vector<double>& direction) {
  const std::vector<double> saved = values;
  const auto loss_at = [&](double step) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = saved[i] + step * direction[i];
    const std::vector<double> y = mla_block_reference(c.config, c.weights, c.seq, c.batch, 900, c.x, {}, 2).y;
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) loss += y[i] * c.dy[i];
    return loss;
  };
  constexpr double kStep = 1e-3;
  const double quotient =
      (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
  values = saved;
  return quotient;
}

TEST(MlaReference, GradientsAreTheDerivatives) {
  RandomCase c = random_case(32, 135, 1);  // more than one query block, unlike the golden files
  const MlaReferenceResult result = run(c, 900, 2);
  std::mt19937_64 generator(11);
  const auto expect_derivative = [&](const std::string& name, std::vector<double>& values,
                                     const std::vector<double>& gradient) {
    const double deviation = 1 / std::sqrt(static_cast<double>(values.size()));
    const auto direction = random_values(generator, static_cast<std::int64_t>(values.size()), deviation);
    double expected = 0, largest = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      expected += gradient[i] * direction[i];
      largest = std::max(largest, std::abs(gradient[i]));
    }
    // Truncation step⁴ = 1e-12 times a fifth derivative, cancellation ε / step = 1e-13 of a loss of some hundreds.
    EXPECT_NEAR(difference_quotient(c, values, direction), expected, 1e-8 * (1 + largest)) << name;
  };
  expect_derivative("x", c.x, result.dx);
  for (const MlaReferenceWeight& weight : mla_reference_weights(c.config)) {
    const std::string name(weight.name);
    ASSERT_TRUE(result.gradients.count(name)) << name;
    expect_derivative(name, c.weights.*weight.member, result.gradients.at(name));
  }
}

TEST(MlaReference, NamesTheWeightOfAWrongSize) {
  RandomCase c = random_case(32, 4, 1);
  c.weights.kv_b_proj.pop_back();
  try {
    run(c, 0, 1);
    FAIL() << "accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("self_attn.kv_b_proj.weight"));
  }
  c = random_case(32, 4, 1);
  c.weights.kv_a_layernorm.clear();  // the configuration says that it is there
  EXPECT_THROW(run(c, 0, 1), std::invalid_argument);
  c = random_case(32, 4, 1);
  c.seq = 5;
  EXPECT_THROW(run(c, 0, 1), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
