// The transforms against NumPy, and what they promise.
#include "convert/transform.h"

#include <gmock/gmock.h>

#include <numeric>

#include "convert/convert_fixture.h"
#include "golden/golden_file.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using golden::read_golden_file;
using ::testing::HasSubstr;
using testing::max_relative_difference;
using testing::message_of;

constexpr std::int64_t kTokens = 200, kHeads = 2, kNope = 3, kValue = 4, kRank = 8;

ModelConfig golden_config() {
  ModelConfig config;
  config.name = "golden";
  config.num_attention_heads = kHeads;
  config.qk_nope_head_dim = kNope;
  config.qk_rope_head_dim = 4;
  config.v_head_dim = kValue;
  config.kv_lora_rank = kRank;
  return config;
}

LayerMoments golden_moments(const GoldenFile& file) {
  return {kTokens, file.values("second"), file.values("first"), file.values("query_second")};
}

class GoldenTransform : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenTransform, EqualsNumPy) {
  const GoldenFile file = read_golden_file("tpla");
  const ModelConfig config = golden_config();
  const LayerMoments moments = golden_moments(file);
  const std::vector<double> u = tpla_transform(
      parse_tpla_transform(GetParam()),
      {.config = config, .moments = moments, .kv_b = file.values("kv_b"), .gamma = file.values("gamma")});
  // Eigenvectors amplify a rounding by one over the gap of the eigenvalues, below 100 here.
  EXPECT_LE(max_relative_difference(u, file.values(GetParam() + ".vectors")), 1e-10);
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTransform, ::testing::Values("pca", "pca-centred", "query-aware"),
                         [](const auto& i) {
                           return i.param == "pca" ? "pca" : i.param == "pca-centred" ? "centred" : "query_aware";
                         });

TEST(Transform, AbsorbedQueryMomentEqualsNumPy) {
  const GoldenFile file = read_golden_file("tpla");
  const ModelConfig config = golden_config();
  const LayerMoments moments = golden_moments(file);
  const std::vector<double> q = absorbed_query_moment(
      {.config = config, .moments = moments, .kv_b = file.values("kv_b"), .gamma = file.values("gamma")});
  EXPECT_LE(max_relative_difference(q, file.values("query_moment")), 1e-13);  // sums of 400 products
}

TEST(Transform, ColumnMomentsAreTheEigenvalues) {
  const GoldenFile file = read_golden_file("tpla");
  const std::vector<double> moments = column_moments(golden_moments(file), file.values("pca.vectors"));
  EXPECT_LE(max_relative_difference(moments, file.values("pca.values")), 1e-13);
  EXPECT_TRUE(std::is_sorted(moments.rbegin(), moments.rend()));
}

double largest_of_u_ut_minus_identity(const std::vector<double>& u, std::size_t d) {
  double largest = 0;
  for (std::size_t i = 0; i < d; ++i) {
    for (std::size_t j = 0; j < d; ++j) {
      double sum = i == j ? -1 : 0;
      for (std::size_t k = 0; k < d; ++k) sum += u[i * d + k] * u[j * d + k];
      largest = std::max(largest, std::abs(sum));
    }
  }
  return largest;
}

TEST(Transform, EveryOneIsOrthogonal) {
  const GoldenFile file = read_golden_file("tpla");
  const ModelConfig config = golden_config();
  const LayerMoments moments = golden_moments(file);
  for (const char* name : {"none", "hadamard", "pca", "pca-centred", "query-aware"}) {
    const auto u =
        tpla_transform(parse_tpla_transform(name),
                       {.config = config, .moments = moments, .kv_b = file.values("kv_b"), .gamma = {}, .seed = 5});
    EXPECT_LE(largest_of_u_ut_minus_identity(u, kRank), 1e-13) << name;
  }
}

TEST(Transform, HadamardDependsOnSeedAndLayer) {
  const GoldenFile file = read_golden_file("tpla");
  const ModelConfig config = golden_config();
  const LayerMoments moments = golden_moments(file);
  const auto make = [&](std::uint64_t seed, std::int64_t layer) {
    return tpla_transform(
        TplaTransform::hadamard,
        {.config = config, .moments = moments, .kv_b = file.values("kv_b"), .gamma = {}, .seed = seed, .layer = layer});
  };
  EXPECT_EQ(make(1, 0), make(1, 0));
  EXPECT_NE(make(1, 0), make(2, 0));
  EXPECT_NE(make(1, 0), make(1, 1));
}

/// A skewed latent: column 0 carries most of the norm.
LayerMoments skewed_moments(std::int64_t d, std::vector<std::vector<double>>& rows) {
  const auto size = static_cast<std::size_t>(d);
  LayerMoments moments{.second = std::vector<double>(size * size, 0), .first = std::vector<double>(size, 0)};
  for (std::uint64_t t = 0; t < 300; ++t) {
    std::vector<double> f(size);
    for (std::size_t j = 0; j < size; ++j) f[j] = testing::noise(t, j) * (j < 2 ? 3 : 0.5);
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = 0; j < size; ++j) moments.second[i * size + j] += f[i] * f[j];
      moments.first[i] += f[i];
    }
    ++moments.num_tokens;
    rows.push_back(f);
  }
  return moments;
}

// The paper's equation 25 writes a_i = p_i; its equation 18 and its Hadamard example, α = 2 for two shards, need 1/p_i:
// with it the estimate of ‖f‖²/d from one half is unbiased, with p_i it is four times too small.
TEST(Transform, SlicedRmsNeedsTheInverseShare) {
  ModelConfig config = golden_config();
  config.kv_lora_rank = 16;
  std::vector<std::vector<double>> rows;
  const LayerMoments moments = skewed_moments(16, rows);
  const TplaOptions options{.transform = TplaTransform::hadamard, .num_shards = 2, .rms = TplaRms::sliced};
  const auto u =
      tpla_transform(options.transform, {.config = config, .moments = moments, .kv_b = {}, .gamma = {}, .seed = 1});
  const TplaLayer layer = tpla_layer(options, config, column_moments(moments, u));
  for (const double a : layer.rms_scale) EXPECT_NEAR(a, 2, 0.2);  // a sample of 300 tokens, 2 strong directions
  double whole = 0, half = 0;
  for (const auto& f : rows) {
    for (std::size_t j = 0; j < 16; ++j) {
      double rotated = 0;
      for (std::size_t k = 0; k < 16; ++k) rotated += f[k] * u[k * 16 + j];
      whole += rotated * rotated;
      if (j < 8) half += rotated * rotated;
    }
  }
  EXPECT_NEAR(layer.rms_scale[0] * half / whole, 1, 1e-12);
  EXPECT_NEAR(layer.shares[0] * half / whole, 0.25, 0.05);
}

TEST(Transform, SharesSumToOneAndKappaFollows) {
  const ModelConfig config = golden_config();
  const std::vector<double> moments = {8, 4, 2, 2, 1, 1, 1, 1};
  const auto layer = [&](TplaKappa kappa, std::int64_t shared, TplaRms rms) {
    return tpla_layer({.num_shards = 2, .shared_columns = shared, .rms = rms, .kappa = kappa}, config, moments);
  };
  EXPECT_THAT(layer(TplaKappa::share, 0, TplaRms::exact).kappa, ::testing::ElementsAre(0.8, 0.2, 0.8, 0.2));
  EXPECT_THAT(layer(TplaKappa::inverse_share, 0, TplaRms::exact).kappa, ::testing::ElementsAre(1.25, 5, 1.25, 5));
  EXPECT_THAT(layer(TplaKappa::one, 2, TplaRms::sliced).shares, ::testing::ElementsAre(5.0 / 8, 3.0 / 8));
  EXPECT_THAT(layer(TplaKappa::one, 2, TplaRms::sliced).rms_scale, ::testing::ElementsAre(20.0 / 17, 20.0 / 15));
  EXPECT_THAT(layer(TplaKappa::one, 0, TplaRms::exact).rms_scale, ::testing::ElementsAre(1, 1));
  EXPECT_THAT(layer(TplaKappa::one, 8, TplaRms::sliced).rms_scale, ::testing::ElementsAre(1, 1));
}

TEST(TplaOptions, WrongOnesAreNamed) {
  ModelConfig config = golden_config();
  const auto why = [&](const TplaOptions& options) { return message_of([&] { check_tpla_options(options, config); }); };
  EXPECT_EQ(why({.num_shards = 4}), "");
  EXPECT_EQ(why({.num_shards = 3, .shared_columns = 2}), "");
  EXPECT_THAT(why({.num_shards = 3}), HasSubstr("--shards 3: it doesn't divide 8 columns"));
  EXPECT_THAT(why({.num_shards = 4, .shared_columns = 2}), HasSubstr("6 columns (kv_lora_rank 8, less 2 shared)"));
  EXPECT_THAT(why({.num_shards = 0}), HasSubstr("--shards 0: from 1"));
  EXPECT_THAT(why({.shared_columns = 9}), HasSubstr("--shared-columns 9: from 0 to kv_lora_rank, 8"));
  config.kv_lora_rank = 12;
  EXPECT_THAT(why({.transform = TplaTransform::hadamard}), HasSubstr("kv_lora_rank is 12, which is no power of two"));
  config.kv_a_layernorm = false;
  EXPECT_THAT(why({.rms = TplaRms::sliced}), HasSubstr("no kv_a_layernorm"));
  config.attention = AttentionKind::gqa;
  EXPECT_THAT(why({}), HasSubstr("grouped-query"));
  EXPECT_THAT(message_of([] { parse_tpla_transform("svd"); }),
              HasSubstr("none, hadamard, pca, pca-centred, query-aware"));
}

}  // namespace
}  // namespace isomer
