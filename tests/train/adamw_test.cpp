// The optimiser against the same steps written out in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "train/train_fixture.h"

namespace isomer {
namespace {

using testing::config_from;
using testing::kLatentModel;
using testing::noise_values;
using testing::set_values;
using testing::values_of;

/// One weight of AdamW as Loshchilov and Hutter's algorithm 2 has it, with the rate as schedule multiplier.
struct Twin {
  double w, m = 0, v = 0;
  void step(const AdamWOptions& o, double g, std::int64_t t, double rate, bool decays) {
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, static_cast<double>(t)));
    const double v_hat = v / (1 - std::pow(o.beta2, static_cast<double>(t)));
    w = w - rate * m_hat / (std::sqrt(v_hat) + o.epsilon) - (decays ? rate * o.weight_decay * w : 0);
  }
};

RankOptions threads(int count) { return {.num_threads = count}; }

/// Gradients of step `step`, entry by entry of the flat buffer, some of them 0 and some tiny.
std::vector<double> gradient_values(std::int64_t step, std::int64_t count, double scale) {
  auto values = noise_values(static_cast<std::uint64_t>(step) + 50, count, scale);
  for (std::size_t i = 0; i < values.size(); i += 7) values[i] *= i % 2 == 0 ? 0 : 1e-9;
  return testing::rounded(std::move(values), DType::f32);
}

class AdamWSteps : public ::testing::TestWithParam<double> {};

TEST_P(AdamWSteps, AreThoseOfTheAlgorithm) {
  const ModelConfig config = config_from(kLatentModel);
  const AdamWOptions options{.weight_decay = 0.3, .clip_norm = GetParam()};
  RankContext ctx(threads(3));
  Parameters parameters(ctx, config, DType::f32);
  parameters.set(testing::spread_weights(config));
  const std::int64_t count = parameters.master.numel();
  std::vector<Twin> twins;
  for (const double w : values_of(parameters.master)) twins.push_back({w});
  const std::vector<double> before = values_of(parameters.master);

  for (std::int64_t step = 0; step < 6; ++step) {
    const auto gradient = gradient_values(step, count, step % 2 == 0 ? 0.01 : 1);
    double squares = 0;
    for (const Parameter& p : parameters.list()) {
      const std::vector<double> mine(gradient.begin() + p.offset, gradient.begin() + p.offset + p.count);
      set_values(parameters.view(parameters.gradient, p), mine);
      for (const double g : mine) squares += g * g;
    }
    const double norm = gradient_norm(ctx, parameters), rate = 1e-2 / static_cast<double>(step + 1);
    ASSERT_NEAR(norm, std::sqrt(squares), 1e-12 * norm);
    adamw_step(ctx, parameters, options, step, rate, norm);
    const double clip = options.clip_norm > 0 ? std::min(1.0, options.clip_norm / norm) : 1;
    for (const Parameter& p : parameters.list()) {
      for (std::int64_t i = p.offset; i < p.offset + p.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        twins[at].step(options, clip * gradient[at], step + 1, rate, p.shape.size() > 1);
      }
    }
  }
  const auto after = values_of(parameters.master);
  double largest = 0, moved = 0;
  for (const Parameter& p : parameters.list()) {
    for (auto at = static_cast<std::size_t>(p.offset); at < static_cast<std::size_t>(p.offset + p.count); ++at) {
      // Float32 all through: some roundings of the weight, and of an update of at most 0.04 in all.
      largest = std::max(largest, std::abs(after[at] - twins[at].w) / (std::abs(twins[at].w) + 0.05));
      moved = std::max(moved, std::abs(after[at] - before[at]));
    }
  }
  EXPECT_LT(largest, 32 * 0x1p-24);
  EXPECT_GT(moved, 5e-3);
}

// Never reached, reached every second step, always, off.
INSTANTIATE_TEST_SUITE_P(Clipping, AdamWSteps, ::testing::Values(1e6, 5.0, 0.1, 0.0),
                         [](const auto& test) { return testing::plain_name(fmt::format("norm{}", test.param)); });

TEST(AdamW, DecaysMatricesOnlyAndLeavesPaddingAlone) {
  const ModelConfig config = config_from(kLatentModel);
  RankContext ctx(threads(1));
  Parameters parameters(ctx, config, DType::f32);
  parameters.set(testing::spread_weights(config));
  const auto before = values_of(parameters.master);
  const std::vector<float> bias(
      parameters.weights.layers[1].moe.e_score_correction_bias.data<float>(),
      parameters.weights.layers[1].moe.e_score_correction_bias.data<float>() + config.moe.n_routed_experts);
  adamw_step(ctx, parameters, {.weight_decay = 0.5}, 0, 0.1, 0);  // no gradient
  const auto after = values_of(parameters.master);
  std::size_t matrices = 0, vectors = 0;
  std::vector<bool> owned(before.size(), false);
  for (const Parameter& p : parameters.list()) {
    const bool matrix = p.shape.size() > 1;
    EXPECT_EQ(p.decays, matrix) << p.name;
    ++(matrix ? matrices : vectors);
    for (auto at = static_cast<std::size_t>(p.offset); at < static_cast<std::size_t>(p.offset + p.count); ++at) {
      owned[at] = true;
      ASSERT_NEAR(after[at], matrix ? 0.95 * before[at] : before[at], 1e-7 * std::abs(before[at])) << p.name;
    }
  }
  EXPECT_GT(matrices, 10u);
  EXPECT_GT(vectors, 5u);
  for (std::size_t at = 0; at < owned.size(); ++at) EXPECT_TRUE(owned[at] || after[at] == 0);
  for (std::size_t e = 0; e < bias.size(); ++e) {
    EXPECT_EQ(parameters.weights.layers[1].moe.e_score_correction_bias.data<float>()[e], bias[e]);
  }
}

TEST(AdamW, NormAndStepDoNotDependOnThreads) {
  ModelConfig config = config_from(kLatentModel);
  config.vocab_size = 5000;  // several blocks a tensor
  std::vector<Tensor> weights;
  std::vector<double> norms;
  for (const int count : {1, 2, 3, 5}) {
    RankContext ctx(threads(count));
    Parameters parameters(ctx, config, DType::f32);
    ASSERT_GT(parameters.master.numel(), 4 * 16384);
    set_values(parameters.gradient, noise_values(1, parameters.gradient.numel()));
    norms.push_back(gradient_norm(ctx, parameters));
    for (int step = 0; step < 2; ++step) adamw_step(ctx, parameters, {}, step, 1e-3, norms.back());
    weights.push_back(parameters.master);
  }
  for (std::size_t i = 1; i < norms.size(); ++i) {
    EXPECT_EQ(norms[i], norms[0]);
    EXPECT_EQ(std::memcmp(weights[i].raw(), weights[0].raw(), static_cast<std::size_t>(weights[0].nbytes())), 0);
  }
}

TEST(LearningRate, WarmsUpAndEndsAtTheMinimum) {
  const AdamWOptions o{.learning_rate = 2e-3, .min_learning_rate = 1e-4, .warmup_steps = 10};
  for (std::int64_t step = 0; step < 10; ++step) {
    EXPECT_DOUBLE_EQ(learning_rate(o, step, 111), 2e-4 * static_cast<double>(step + 1));
  }
  EXPECT_DOUBLE_EQ(learning_rate(o, 10, 111), 2e-3);
  EXPECT_NEAR(learning_rate(o, 60, 111), (2e-3 + 1e-4) / 2, 1e-15);  // half way
  EXPECT_NEAR(learning_rate(o, 110, 111), 1e-4, 1e-15);              // the last step
  EXPECT_NEAR(learning_rate(o, 5000, 111), 1e-4, 1e-15);             // and beyond
  for (std::int64_t step = 10; step < 110; ++step) {
    EXPECT_GT(learning_rate(o, step, 111), learning_rate(o, step + 1, 111));
  }
}

TEST(LearningRate, EdgesAreFinite) {
  AdamWOptions o{.learning_rate = 1, .min_learning_rate = 0.5, .warmup_steps = 0};
  EXPECT_EQ(learning_rate(o, 0, 5), 1);
  EXPECT_NEAR(learning_rate(o, 4, 5), 0.5, 1e-15);
  EXPECT_EQ(learning_rate(o, 0, 1), 1);  // a run of one step
  o.warmup_steps = 3;
  EXPECT_EQ(learning_rate(o, 2, 3), 1);  // nothing but warm-up
}

}  // namespace
}  // namespace isomer
