#include "model/weights.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <map>

#include "model/random.h"

namespace isomer {
namespace {

using testing::HasSubstr;

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const T* data = tensor.data<T>();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(data[i]);
  });
  return values;
}

TEST(SeededValues, AreStandardNormal) {
  const auto values = values_of(seeded_tensor(1, "x", {1 << 20}, DType::f64));
  double sum = 0, square = 0, cube = 0, fourth = 0, lag = 0;
  int beyond_two = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    ASSERT_TRUE(std::isfinite(x));
    sum += x;
    square += x * x;
    cube += x * x * x;
    fourth += x * x * x * x;
    lag += i > 0 ? x * values[i - 1] : 0;
    beyond_two += std::abs(x) > 2;
  }
  const double n = static_cast<double>(values.size());
  const double sigma = 1 / std::sqrt(n);  // of the mean; five of them are a chance of 6e-7
  EXPECT_NEAR(sum / n, 0, 5 * sigma);
  EXPECT_NEAR(square / n, 1, 5 * std::sqrt(2.0) * sigma);
  EXPECT_NEAR(cube / n, 0, 5 * std::sqrt(15.0) * sigma);
  EXPECT_NEAR(fourth / n, 3, 5 * std::sqrt(96.0) * sigma);
  EXPECT_NEAR(lag / n, 0, 5 * sigma);
  EXPECT_NEAR(beyond_two / n, 0.045500, 5 * std::sqrt(0.0455) * sigma);
}

TEST(SeededValues, FollowBoxMullerOfTheLibrary) {
  // Pairs lie on circles of radius √(−2 ln u): the sum of squares of a pair is exponential with mean 2.
  const auto values = values_of(seeded_tensor(5, "pairs", {200000}, DType::f64));
  double sum = 0, smallest = 1e9, largest = 0;
  int quadrants[4] = {};
  for (std::size_t i = 0; i < values.size(); i += 2) {
    const double r2 = values[i] * values[i] + values[i + 1] * values[i + 1];
    sum += r2;
    smallest = std::min(smallest, r2);
    largest = std::max(largest, r2);
    ++quadrants[(values[i] < 0) + 2 * (values[i + 1] < 0)];
  }
  EXPECT_NEAR(sum / 100000, 2, 5 * 2 / std::sqrt(100000.0));
  EXPECT_LT(smallest, 1e-3);
  EXPECT_GT(largest, 15);
  for (const int count : quadrants) EXPECT_NEAR(count, 25000, 5 * std::sqrt(25000 * 0.75));
}

// The very values: a change of generator, compiler or processor that moves them would move every recorded result.
TEST(SeededValues, AreTheSameEverywhere) {
  const auto values = values_of(seeded_tensor(42, "model.layers.0.self_attn.o_proj.weight", {4}, DType::f64));
  const std::vector<double> golden{-0x1.a612fa96fbd2p+0, 0x1.436bd313ca116p-2, -0x1.0e8d960191ddp+1,
                                   -0x1.d187fcded2f5cp-1};
  EXPECT_EQ(values, golden);
}

TEST(SeededValues, DependOnSeedNameAndIndexAlone) {
  const std::int64_t size = 5000;
  const auto whole = values_of(seeded_tensor(7, "t", {size}, DType::f32));
  for (const auto& [begin, count] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 0}, {0, 1}, {1, 1}, {3, 700}, {511, 2}, {512, 1}, {1023, 3000}, {4999, 1}}) {
    std::vector<float> part(static_cast<std::size_t>(count) + 1, 77.f);
    fill_seeded(7, "t", begin, count, {}, DType::f32, part.data());
    for (std::int64_t i = 0; i < count; ++i)
      ASSERT_EQ(part[static_cast<std::size_t>(i)], whole[static_cast<std::size_t>(begin + i)]);
    EXPECT_EQ(part.back(), 77.f);
  }
  EXPECT_NE(values_of(seeded_tensor(8, "t", {10}, DType::f32)), values_of(seeded_tensor(7, "t", {10}, DType::f32)));
  EXPECT_NE(values_of(seeded_tensor(7, "u", {10}, DType::f32)), values_of(seeded_tensor(7, "t", {10}, DType::f32)));
}

TEST(SeededValues, AreTheSameUpToRoundingInEveryDType) {
  const auto f64 = values_of(seeded_tensor(3, "t", {1001}, DType::f64, 0.3));
  const auto f32 = values_of(seeded_tensor(3, "t", {1001}, DType::f32, 0.3));
  const auto bf16s = values_of(seeded_tensor(3, "t", {1001}, DType::bf16, 0.3));
  for (std::size_t i = 0; i < f64.size(); ++i) {
    EXPECT_EQ(f32[i], static_cast<float>(f64[i]));
    EXPECT_EQ(bf16s[i], static_cast<float>(bf16(f64[i])));
  }
}

TEST(SeededValues, DoNotDependOnThreads) {
  const std::int64_t size = (1 << 20) + 4099;  // above the size from which a second thread helps
  const auto tensor = seeded_tensor(9, "big", {size}, DType::f32);
  std::vector<float> one(static_cast<std::size_t>(size));
  fill_seeded(9, "big", 0, size, {}, DType::f32, one.data());
  EXPECT_TRUE(std::equal(one.begin(), one.end(), tensor.data<float>()));
}

TEST(SeededMlaWeights, HaveTheShapesOfTheConfiguration) {
  const auto config = load_model_config("deepseek-v3");
  const auto weights = seeded_attention_weights(config, 1, DType::bf16, true);
  std::map<std::string, Shape, std::less<>> shapes;
  std::int64_t total = 0;
  weights.for_each([&](std::string_view name, const Tensor& tensor) {
    EXPECT_TRUE(tensor.shape_only());
    shapes.emplace(name, tensor.shape());
    total += tensor.numel();
  });
  EXPECT_EQ(total, num_attention_parameters(config));
  EXPECT_EQ(shapes.size(), 8u);
  EXPECT_EQ(shapes["self_attn.q_b_proj.weight"], (Shape{128 * 192, 1536}));
  EXPECT_EQ(shapes["self_attn.kv_a_proj_with_mqa.weight"], (Shape{576, 7168}));
  EXPECT_EQ(shapes["self_attn.kv_b_proj.weight"], (Shape{128 * 256, 512}));
  EXPECT_EQ(shapes["self_attn.o_proj.weight"], (Shape{7168, 128 * 128}));
}

TEST(SeededMlaWeights, CoverEveryOptionalTensor) {
  for (const auto* name : {"deepseek-v2-lite", "tiny-mla", "minicpm3", "glm-5"}) {
    for (const bool bias : {false, true}) {
      for (const bool norm : {false, true}) {
        auto config = load_model_config(name);
        config.attention_bias = bias;
        config.kv_a_layernorm = norm;
        const auto weights = seeded_attention_weights(config, 1, DType::f32, true);
        std::int64_t total = 0;
        weights.for_each([&](std::string_view, const Tensor& tensor) { total += tensor.numel(); });
        EXPECT_EQ(total, num_attention_parameters(config)) << name << bias << norm;
        EXPECT_EQ(weights.kv_a_layernorm.defined(), norm);
        EXPECT_EQ(weights.o_bias.defined(), bias);
        EXPECT_EQ(weights.q_proj.defined(), config.q_lora_rank == 0);
      }
    }
  }
}

// Inputs of unit RMS through q (or q_a → norm → q_b) and kv_a: the nope part of the logits, s·q·k, spreads by about
// 3·√(n/(n+r)).
TEST(SeededMlaWeights, GiveLogitsASpread) {
  const auto config = load_model_config("tiny-mla");
  const auto weights = seeded_attention_weights(config, 11, DType::f64);
  const auto q_b = values_of(weights.q_b_proj);
  const auto kv_b = values_of(weights.kv_b_proj);
  const std::int64_t q_lora = config.q_lora_rank, d = config.kv_lora_rank, n = config.qk_nope_head_dim;
  double square = 0;
  int count = 0;
  for (int sample = 0; sample < 40; ++sample) {
    const auto c_q = values_of(seeded_tensor(1, fmt::format("q{}", sample), {q_lora}, DType::f64));
    const auto c = values_of(seeded_tensor(1, fmt::format("c{}", sample), {d}, DType::f64));
    for (std::int64_t head = 0; head < config.num_attention_heads; ++head) {
      double logit = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        double q = 0, k = 0;
        for (std::int64_t j = 0; j < q_lora; ++j)
          q += q_b[static_cast<std::size_t>((head * config.qk_head_dim() + i) * q_lora + j)] *
               c_q[static_cast<std::size_t>(j)];
        for (std::int64_t j = 0; j < d; ++j)
          k += kv_b[static_cast<std::size_t>((head * (n + config.v_head_dim) + i) * d + j)] *
               c[static_cast<std::size_t>(j)];
        logit += q * k;
      }
      square += std::pow(softmax_scale(config) * logit, 2);
      ++count;
    }
  }
  const double expected = 3 * std::sqrt(static_cast<double>(n) / static_cast<double>(config.qk_head_dim()));
  EXPECT_NEAR(std::sqrt(square / count), expected, 0.15 * expected);
}

TEST(SeededMlaWeights, NormsAreNearOneAndLayersDiffer) {
  const auto config = load_model_config("tiny-mla");
  const auto weights = seeded_attention_weights(config, 1, DType::f32);
  for (const double value : values_of(weights.input_layernorm)) EXPECT_NEAR(value, 1, 0.6);
  const auto other = seeded_attention_weights(config, 1, DType::f32, false, 1);
  EXPECT_NE(values_of(weights.o_proj), values_of(other.o_proj));
}

TEST(SeededAttentionWeights, OfGroupedQueryAttention) {
  const auto weights = seeded_attention_weights(load_model_config("smollm2-135m"), 1, DType::f32);
  EXPECT_EQ(weights.q_proj.shape(), (Shape{576, 576}));
  EXPECT_EQ(weights.k_proj.shape(), (Shape{192, 576}));
  EXPECT_EQ(weights.v_proj.shape(), (Shape{192, 576}));
  EXPECT_FALSE(weights.kv_a_proj.defined());
  EXPECT_FALSE(weights.q_bias.defined());
}

TEST(SeededEmbedding, GivesOnlyTheRowsAsked) {
  const std::vector<std::int64_t> all = [] {
    std::vector<std::int64_t> ids(256);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
    return ids;
  }();
  const auto table = seeded_embedding_rows(4, all, 33, DType::f32);
  const std::vector<std::int64_t> ids{255, 0, 7, 7};
  const auto rows = seeded_embedding_rows(4, ids, 33, DType::f32);
  ASSERT_EQ(rows.shape(), (Shape{4, 33}));
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (int j = 0; j < 33; ++j) EXPECT_EQ(rows.data<float>()[i * 33 + j], table.data<float>()[ids[i] * 33 + j]);
  const std::vector<std::int64_t> outside{256};
  EXPECT_THROW(seeded_embedding_rows(4, outside, 33, DType::f32), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
