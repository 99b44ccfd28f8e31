// Embedding, last norm, head and cross-entropy against the float64 reference, in chunks of several sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "kernels/cpu/elementwise.h"
#include "kernels/elementwise.h"
#include "layers/head.h"
#include "layers/reference/head.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using namespace testing;

struct HeadProblem {
  ModelConfig config;
  Tensor norm, lm_head, x;
  std::vector<std::int32_t> targets;  // every fifth not scored
};

HeadProblem make_problem(std::int64_t tokens, std::int64_t hidden, std::int64_t vocabulary, DType dtype) {
  HeadProblem p;
  p.config.hidden_size = hidden;
  p.config.vocab_size = vocabulary;
  p.config.rms_norm_eps = 1e-5;
  p.norm = tensor_of(noise_values(1, hidden, 0.3, 1), dtype, {hidden});
  const double gain = 3 / std::sqrt(static_cast<double>(hidden));  // logits of about 3
  p.lm_head = tensor_of(noise_values(2, vocabulary * hidden, gain), dtype, {vocabulary, hidden});
  p.x = tensor_of(noise_values(3, tokens * hidden), dtype, {tokens, hidden});
  for (std::int64_t t = 0; t < tokens; ++t) {
    p.targets.push_back(t % 5 == 4 ? -1 : static_cast<std::int32_t>(t * 7919 % vocabulary));
  }
  return p;
}

struct HeadOutcome {
  HeadLoss loss;
  Tensor dx, dnorm, dlm_head;
};

HeadOutcome run_head(RankContext& ctx, const HeadProblem& p, double scale, std::int64_t chunk_rows) {
  const DType wide = statistic_dtype(p.x.dtype());
  HeadOutcome r;
  r.dx = ctx.empty("dx", MemoryClass::workspace, p.x.dtype(), p.x.shape());
  r.dnorm = ctx.empty("dnorm", MemoryClass::gradient, wide, p.norm.shape());
  r.dlm_head = ctx.zeros("dlm_head", MemoryClass::gradient, wide, p.lm_head.shape());
  const HeadGradients gradients{.dx = r.dx, .dnorm = r.dnorm, .dlm_head = r.dlm_head};
  r.loss = head_loss_and_gradients(ctx, {p.config, p.norm, p.lm_head}, p.x, p.targets, scale, gradients, chunk_rows);
  return r;
}

HeadOutcome run_head(const HeadProblem& p, double scale, std::int64_t chunk_rows, int num_threads = 1) {
  RankContext ctx({.num_threads = num_threads});
  ctx.memory().poison = true;
  return run_head(ctx, p, scale, chunk_rows);
}

HeadReferenceResult reference_of(const HeadProblem& p, double scale) {
  return head_reference(p.config, values_of(p.norm), values_of(p.lm_head), values_of(p.x), p.targets, scale);
}

/// float64 and float32: sums of up to some hundred terms, an exp of logits of 10. bfloat16: x normed and dlogits are
/// rounded to 8 bits, half an ε each; a logit of 10 moves by 10·ε/2·√(1/D) and its probability with it.
double bound_of(DType dtype) { return dtype == DType::bf16 ? 6 * epsilon_of(dtype) : 64 * epsilon_of(dtype); }

struct HeadShape {
  std::int64_t tokens, hidden, vocabulary;
};

class Head : public ::testing::TestWithParam<std::tuple<HeadShape, DType, std::int64_t>> {};

TEST_P(Head, AgreesWithTheReference) {
  const auto& [shape, dtype, chunk_rows] = GetParam();
  HeadProblem p = make_problem(shape.tokens, shape.hidden, shape.vocabulary, dtype);
  const double scale = 0.37, bound = bound_of(dtype);
  const HeadReferenceResult expected = reference_of(p, scale);
  const HeadOutcome outcome = run_head(p, scale, chunk_rows);
  EXPECT_NEAR(outcome.loss.loss_sum, expected.loss_sum, bound * (1 + expected.loss_sum));
  EXPECT_EQ(outcome.loss.num_targets, expected.num_targets);
  if (dtype != DType::bf16) {
    EXPECT_EQ(outcome.loss.num_correct, expected.num_correct);
  }
  EXPECT_LE(max_relative_difference(values_of(outcome.dx), expected.dx), bound);
  EXPECT_LE(max_relative_difference(values_of(outcome.dnorm), expected.dnorm), bound);
  EXPECT_LE(max_relative_difference(values_of(outcome.dlm_head), expected.dlm_head), bound);

  RankContext ctx({});
  const HeadLayer layer{p.config, p.norm, p.lm_head};
  EXPECT_EQ(head_loss(ctx, layer, p.x, p.targets, chunk_rows).loss_sum, outcome.loss.loss_sum);
  EXPECT_LE(max_difference(head_token_losses(ctx, layer, p.x, p.targets, chunk_rows), expected.losses), 20 * bound);
  EXPECT_LE(max_relative_difference(values_of(head_logits(ctx, layer, p.x)), expected.logits), bound);
}

INSTANTIATE_TEST_SUITE_P(Grid, Head,
                         ::testing::Combine(::testing::Values(HeadShape{0, 20, 37}, HeadShape{1, 20, 37},
                                                              HeadShape{33, 20, 37}, HeadShape{70, 65, 300}),
                                            ::testing::Values(DType::f64, DType::f32, DType::bf16),
                                            ::testing::Values(0, 1, 16, 32)));

TEST(HeadLayerTest, LogitsAreDividedWhereTheConfigurationSaysSo) {
  HeadProblem p = make_problem(9, 20, 37, DType::f64);
  const double plain = run_head(p, 1, 0).loss.loss_sum;
  p.config.dim_model_base = 5;  // hidden_size/dim_model_base = 4
  const HeadOutcome outcome = run_head(p, 1, 0);
  const HeadReferenceResult expected = reference_of(p, 1);
  EXPECT_GT(std::abs(plain - expected.loss_sum), 1);
  EXPECT_NEAR(outcome.loss.loss_sum, expected.loss_sum, 1e-11);
  EXPECT_LE(max_relative_difference(values_of(outcome.dx), expected.dx), bound_of(DType::f64));
  EXPECT_LE(max_relative_difference(values_of(outcome.dlm_head), expected.dlm_head), bound_of(DType::f64));
  RankContext ctx({});
  EXPECT_LE(max_relative_difference(values_of(head_logits(ctx, {p.config, p.norm, p.lm_head}, p.x)), expected.logits),
            bound_of(DType::f64));
}

TEST(HeadLayerTest, TheReferencesGradientsAreTheDerivatives) {
  HeadProblem p = make_problem(6, 12, 11, DType::f64);
  p.config.dim_model_base = 6;
  std::vector<double> norm = values_of(p.norm), lm_head = values_of(p.lm_head), x = values_of(p.x);
  const auto result = head_reference(p.config, norm, lm_head, x, p.targets, 0.37);
  const auto expect_derivative = [&](std::vector<double>& tensor, const std::vector<double>& gradient) {
    const std::vector<double> before = tensor;
    const auto direction = noise_values(90, static_cast<std::int64_t>(tensor.size()), 0.2);
    const auto loss_at = [&](double step) {
      for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = before[i] + step * direction[i];
      return 0.37 * head_reference(p.config, norm, lm_head, x, p.targets, 0.37).loss_sum;
    };
    const double quotient = (8 * (loss_at(1e-3) - loss_at(-1e-3)) - (loss_at(2e-3) - loss_at(-2e-3))) / 12e-3;
    tensor = before;
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    EXPECT_NEAR(quotient, expected, 1e-9);  // step⁴ = 1e-12 times a fifth derivative; ε/step = 1e-13
  };
  expect_derivative(norm, result.dnorm);
  expect_derivative(lm_head, result.dlm_head);
  expect_derivative(x, result.dx);
}

TEST(HeadLayerTest, ThreadsChangeNoBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const HeadProblem p = make_problem(300, 64, 1500, dtype);
    const HeadOutcome one = run_head(p, 1, 128), three = run_head(p, 1, 128, 3);
    EXPECT_EQ(one.loss.loss_sum, three.loss.loss_sum);
    EXPECT_EQ(one.loss.num_correct, three.loss.num_correct);
    EXPECT_EQ(values_of(one.dx), values_of(three.dx));
    EXPECT_EQ(values_of(one.dnorm), values_of(three.dnorm));
    EXPECT_EQ(values_of(one.dlm_head), values_of(three.dlm_head));
  }
}

TEST(HeadLayerTest, ADryRunHasTheMemoryOfARealOne) {
  HeadProblem p = make_problem(50, 20, 37, DType::bf16);
  RankContext real({}), dry({.dry_run = true});
  run_head(real, p, 1, 16);
  p.x = Tensor::unrecorded("x", DType::bf16, p.x.shape(), true);
  const HeadOutcome outcome = run_head(dry, p, 1, 16);
  EXPECT_EQ(outcome.loss.loss_sum, 0);
  EXPECT_EQ(outcome.loss.num_targets, 40);
  EXPECT_EQ(real.memory().peak_activation_bytes(), dry.memory().peak_activation_bytes());
  EXPECT_EQ(real.ops().summaries().size(), dry.ops().summaries().size());
}

// Logits of 50 rows never stand at once: workspace is that of a chunk.
TEST(HeadLayerTest, WorkspaceIsThatOfOneChunk) {
  const HeadProblem p = make_problem(50, 20, 1000, DType::f32);
  RankContext ctx({});
  run_head(ctx, p, 1, 16);
  const std::int64_t chunk = 16 * (1000 + 2 * 20 + 1) * 4 + 20 * 4, dx = 50 * 20 * 4;
  EXPECT_EQ(ctx.memory().peak_activation_bytes(), chunk + dx);
}

TEST(HeadLayerTest, GreedyHitsTakeTheLowestOfEquals) {
  for (const auto set : cpu::available_instruction_sets()) {
    const auto& kernels = cpu::row_kernels_of<float>(set);
    std::vector<float> logits{1, 3, 2, 3};
    logits.resize(40, 0.0f);
    EXPECT_TRUE(kernels.cross_entropy(logits.data(), 40, 1, 1, 1, nullptr).greedy_hit);
    EXPECT_FALSE(kernels.cross_entropy(logits.data(), 40, 1, 3, 1, nullptr).greedy_hit);
    EXPECT_FALSE(kernels.cross_entropy(logits.data(), 40, 1, 0, 1, nullptr).greedy_hit);
  }
}

// Logits far apart neither overflow nor lose the loss.
TEST(HeadLayerTest, CrossEntropyOfExtremeLogits) {
  for (const auto set : cpu::available_instruction_sets()) {
    std::vector<float> logits(33, -1e4f);
    logits[7] = 1e4f;
    const auto& kernels = cpu::row_kernels_of<float>(set);
    EXPECT_EQ(kernels.cross_entropy(logits.data(), 33, 1, 7, 1, nullptr).loss, 0);
    EXPECT_EQ(kernels.cross_entropy(logits.data(), 33, 1, 3, 1, logits.data()).loss, 2e4);
    EXPECT_EQ(logits[7], 1);
    EXPECT_EQ(logits[3], -1);
    EXPECT_EQ(logits[0], 0);
  }
}

TEST(HeadLayerTest, WrongTargetsAndIdsAreRefused) {
  HeadProblem p = make_problem(3, 20, 37, DType::f32);
  RankContext ctx({});
  p.targets[2] = 37;
  EXPECT_THAT(
      [&] {
        head_loss(ctx, {p.config, p.norm, p.lm_head}, p.x, p.targets);
      },
      ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("target 2 is 37")));
  p.targets.pop_back();
  EXPECT_THAT(
      [&] {
        head_loss(ctx, {p.config, p.norm, p.lm_head}, p.x, p.targets);
      },
      ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("2 targets for 3 tokens")));
  const std::vector<std::int32_t> ids{0, -1};
  EXPECT_THAT([&] { embedding_forward(ctx, p.config, p.lm_head, ids); },
              ::testing::ThrowsMessage<std::invalid_argument>(::testing::HasSubstr("token 1 is -1")));
}

TEST(Embedding, RowsTimesScaleAndTheirGradient) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    ModelConfig config;
    config.scale_emb = 12;
    const std::int64_t vocabulary = 9, hidden = 21;
    const Tensor table = tensor_of(noise_values(1, vocabulary * hidden), dtype, {vocabulary, hidden});
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < 100; ++i) ids.push_back(i * i % 7);
    const Tensor dx = tensor_of(noise_values(2, 100 * hidden), dtype, {100, hidden});
    const auto run = [&](int num_threads) {
      RankContext ctx({.num_threads = num_threads});
      ctx.memory().poison = true;
      const Tensor x = embedding_forward(ctx, config, table, ids);
      const Tensor dtable =
          tensor_of(std::vector<double>(vocabulary * hidden, 1), statistic_dtype(dtype), {vocabulary, hidden});
      embedding_backward(ctx, config, ids, dx, dtable);
      return std::pair(values_of(x), values_of(dtable));
    };
    const auto values = values_of(table), gradients = values_of(dx);
    std::vector<double> expected(static_cast<std::size_t>(100 * hidden));
    std::vector<double> expected_table(static_cast<std::size_t>(vocabulary * hidden), 1);  // added to what is there
    for (std::size_t i = 0; i < 100; ++i) {
      for (std::size_t c = 0; c < 21; ++c) {
        expected[i * 21 + c] = 12 * values[static_cast<std::size_t>(ids[i]) * 21 + c];
        expected_table[static_cast<std::size_t>(ids[i]) * 21 + c] += 12 * gradients[i * 21 + c];
      }
    }
    const auto one = run(1), three = run(3);
    EXPECT_LE(max_relative_difference(one.first, expected), epsilon_of(dtype));
    EXPECT_LE(max_relative_difference(one.second, expected_table), 64 * epsilon_of(statistic_dtype(dtype)));
    EXPECT_EQ(one, three);
  }
}

}  // namespace
}  // namespace isomer
