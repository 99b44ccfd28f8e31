// The float64 reference of sharded decode against NumPy, and where it must be exact; the meter of heads against it.
#include "layers/reference/tpla_attention.h"

#include <gmock/gmock.h>

#include "convert/convert_fixture.h"
#include "convert/head_meter.h"
#include "golden/golden_file.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::max_relative_difference;
using testing::message_of;
using testing::noise_values;
using Values = std::vector<double>;

class GoldenAttention : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenAttention, EqualsNumPy) {
  const golden::GoldenFile file = golden::read_golden_file("tpla");
  const auto values = [&](const char* name) { return file.values(GetParam() + "." + name); };
  ModelConfig config;
  config.num_attention_heads = 2;
  config.qk_nope_head_dim = 3;
  config.qk_rope_head_dim = 4;
  config.v_head_dim = 5;
  config.kv_lora_rank = 8;
  const TplaOptions options{.num_shards = 3, .shared_columns = 2, .rms = parse_tpla_rms(GetParam())};
  const TplaLayer scalars{.kappa = values("kappa"), .rms_scale = values("rms_scale")};
  const Values kv_b = values("kv_b"), gamma = values("gamma"), q = values("q"), c = values("c"), k_pe = values("k_pe");
  const TplaReferenceResult result = tpla_attention_reference({.config = config,
                                                               .options = options,
                                                               .scalars = scalars,
                                                               .kv_b = kv_b,
                                                               .gamma = gamma,
                                                               .q = q,
                                                               .c = c,
                                                               .k_pe = k_pe,
                                                               .first_query = 4});
  EXPECT_LE(max_relative_difference(result.attention, values("attention")), 1e-13);  // sums of at most 11·8 terms
  EXPECT_LE(max_relative_difference(result.lse, values("lse")), 1e-13);
}

INSTANTIATE_TEST_SUITE_P(Rms, GoldenAttention, ::testing::Values("exact", "sliced"),
                         [](const auto& instance) { return instance.param; });

/// Weights of one block and an input of `seq` tokens.
struct Block {
  explicit Block(const testing::SmallModel& model) : config(testing::small_config(model)) {
    std::uint64_t seed = 1;
    for (const MlaReferenceWeight& weight : mla_reference_weights(config)) {
      if (weight.optional && !(model.bias && weight.name.ends_with("bias"))) continue;
      const bool is_norm = weight.name.ends_with("norm.weight");
      weights.*weight.member = noise_values(++seed, num_elements(weight.shape), 0.4, is_norm ? 1 : 0);
    }
    x = noise_values(99, kSeq * config.hidden_size);
    exact = mla_block_reference(config, weights, kSeq, 1, 0, x, {}, 1).y;
  }
  Values sharded(const TplaOptions& options, const TplaLayer& scalars, std::int64_t first = 0,
                 LatentSharding sharding = LatentSharding::tpla) const {
    return tpla_block_reference(config, weights, options, scalars, x, first, sharding, 1);
  }
  TplaLayer ones(int g) const {
    return {.kappa = Values(static_cast<std::size_t>(config.num_attention_heads * g), 1),
            .rms_scale = Values(static_cast<std::size_t>(g), 1)};
  }
  static constexpr std::int64_t kSeq = 13;
  ModelConfig config;
  MlaReferenceWeights weights;
  Values x, exact;
};

constexpr double kRounding = 1e-12;  // another order of sums of some hundred terms

TEST(TplaBlock, OneShardIsExact) {
  for (const bool norm : {true, false}) {
    const Block block({.kv_norm = norm, .bias = true});
    EXPECT_LE(max_relative_difference(block.sharded({.num_shards = 1}, block.ones(1)), block.exact), kRounding);
    EXPECT_LE(
        max_relative_difference(block.sharded({.num_shards = 1}, block.ones(1), 0, LatentSharding::gla), block.exact),
        kRounding);
  }
}

TEST(TplaBlock, AllColumnsSharedAreExact) {
  const Block block({});
  for (const TplaRms rms : {TplaRms::exact, TplaRms::sliced}) {
    const TplaOptions options{.num_shards = 4, .shared_columns = 16, .rms = rms};
    EXPECT_LE(max_relative_difference(block.sharded(options, block.ones(4)), block.exact), kRounding);
  }
}

TEST(TplaBlock, TwoShardsAreNotAndPrefillIs) {
  const Block block({});
  const Values tpla = block.sharded({.num_shards = 2}, block.ones(2), 5);
  const auto rows = 5 * block.config.hidden_size;
  EXPECT_TRUE(std::equal(tpla.begin(), tpla.begin() + rows, block.exact.begin()));
  EXPECT_GT(max_relative_difference(tpla, block.exact), 1e-3);
  EXPECT_NE(block.sharded({.num_shards = 2}, block.ones(2)), tpla);
}

TEST(TplaBlock, WhereEveryShardSeesTheSameItIsExact) {
  // Only one key: every softmax is 1, whatever the logits.
  const Block block({.bias = true});
  const Values tpla = block.sharded({.num_shards = 4}, block.ones(4));
  for (std::int64_t i = 0; i < block.config.hidden_size; ++i) {
    EXPECT_NEAR(tpla[static_cast<std::size_t>(i)], block.exact[static_cast<std::size_t>(i)], kRounding);
  }
}

TEST(TplaBlock, WrongInputIsNamed) {
  const Block block({});
  EXPECT_THAT(message_of([&] { block.sharded({.num_shards = 3}, block.ones(3)); }), HasSubstr("--shards 3"));
  EXPECT_THAT(message_of([&] { block.sharded({.num_shards = 2}, block.ones(1)); }), HasSubstr("kappa"));
  EXPECT_THAT(message_of([&] { block.sharded({.num_shards = 2}, block.ones(2), 13); }), HasSubstr("first_sharded 13"));
  EXPECT_THAT(message_of([&] { block.sharded({.num_shards = 2}, block.ones(2), 0, LatentSharding::gla); }),
              HasSubstr("2 groups with 3 heads"));
}

/// Sums over the reference's logits, centred per query: cross, whole², local², and Σ KL.
struct PlainSums {
  double cross = 0, whole = 0, local = 0, divergence = 0;
};
PlainSums plain_sums(const double* whole, const double* local, std::int64_t seq) {
  PlainSums sums;
  for (std::int64_t i = 0; i < seq; ++i) {
    double mean_whole = 0, mean_local = 0, sum_whole = 0, sum_local = 0;
    for (std::int64_t t = 0; t <= i; ++t) {
      mean_whole += whole[i * seq + t] / static_cast<double>(i + 1);
      mean_local += local[i * seq + t] / static_cast<double>(i + 1);
      sum_whole += std::exp(whole[i * seq + t]);
      sum_local += std::exp(local[i * seq + t]);
    }
    for (std::int64_t t = 0; t <= i; ++t) {
      const double g = whole[i * seq + t], l = local[i * seq + t];
      sums.cross += (g - mean_whole) * (l - mean_local);
      sums.whole += (g - mean_whole) * (g - mean_whole);
      sums.local += (l - mean_local) * (l - mean_local);
      sums.divergence += std::exp(g) / sum_whole * std::log(std::exp(g) / sum_whole / (std::exp(l) / sum_local));
    }
  }
  return sums;
}

/// Rows of a sequence for the meter and the reference, seeded.
struct MeterCase {
  ModelConfig config = testing::small_config({});
  std::int64_t seq = 9;
  Values gamma = noise_values(5, 16, 0.3, 1), kv_b = noise_values(6, 3 * 14 * 16, 0.4);
  Values q = noise_values(7, 9 * 3 * 10), c = noise_values(8, 9 * 16), k_pe = noise_values(9, 9 * 4);
  std::vector<std::int32_t> segments = std::vector<std::int32_t>(9, 0);

  TplaReferenceResult reference(const TplaOptions& options, const TplaLayer& layer) const {
    return tpla_attention_reference({.config = config,
                                     .options = options,
                                     .scalars = layer,
                                     .kv_b = kv_b,
                                     .gamma = gamma,
                                     .q = q,
                                     .c = c,
                                     .k_pe = k_pe});
  }
  HeadSums meter(const TplaOptions& options, const TplaLayer& layer, int threads = 1) const {
    HeadMeter meter(config, options, layer, kv_b, gamma);
    meter.add({q, c, k_pe, segments}, threads);
    return meter.sums();
  }
};

TEST(HeadMeter, AgreesWithTheReferenceOfSharding) {
  const MeterCase m;
  for (const TplaRms rms : {TplaRms::exact, TplaRms::sliced}) {
    const TplaOptions options{.num_shards = 2, .shared_columns = 4, .rms = rms};
    const TplaLayer layer{.kappa = noise_values(1, 6, 0.3, 1), .rms_scale = {1.4, 1.7}};
    const TplaReferenceResult whole = m.reference({.num_shards = 1}, {.kappa = Values(3, 1), .rms_scale = {1}});
    const TplaReferenceResult local = m.reference(options, layer);
    const HeadSums sums = m.meter(options, layer, 3);
    const Values cosine = sums.cosine(), divergence = sums.mean_divergence();
    for (std::size_t head = 0; head < 3; ++head) {
      for (std::size_t shard = 0; shard < 2; ++shard) {
        const PlainSums plain =
            plain_sums(whole.logits.data() + head * 81, local.logits.data() + (shard * 3 + head) * 81, 9);
        EXPECT_NEAR(cosine[head * 2 + shard], plain.cross / std::sqrt(plain.whole * plain.local), kRounding);
        EXPECT_NEAR(divergence[head * 2 + shard], plain.divergence / 9, kRounding);
      }
    }
  }
}

TEST(HeadMeter, LeastSquaresKappaIsTheMinimum) {
  const MeterCase m;
  const TplaOptions options{.num_shards = 2};
  TplaLayer layer{.kappa = Values(6, 1), .rms_scale = {1, 1}};
  // ΣΣ (G° − L°)² is smallest at κ; the rope part cancels.
  const auto residual = [&](const Values& kappa) {
    layer.kappa = kappa;
    const HeadSums s = m.meter(options, layer);
    return s.whole_whole[3] - 2 * s.cross[3] + s.local_local[3];
  };
  const Values kappa = m.meter(options, layer).least_squares_kappa();
  const double least = residual(kappa);
  for (const double step : {-0.05, 0.05}) {
    Values other = kappa;
    other[3] += step;
    EXPECT_GT(residual(other), least);
  }
}

TEST(HeadMeter, SegmentsSeeNothingOfEachOther) {
  MeterCase m;
  const TplaOptions options{.num_shards = 2};
  const TplaLayer layer{.kappa = Values(6, 1), .rms_scale = {1, 1}};
  std::fill(m.segments.begin() + 4, m.segments.end(), 1);
  const HeadSums before = m.meter(options, layer);
  for (std::size_t i = 0; i < 4 * 16; ++i) m.c[i] += 1;
  const HeadSums after = m.meter(options, layer);
  m.segments.assign(9, 0);
  EXPECT_NE(before.divergence, after.divergence);  // of the first segment itself
  MeterCase tail = m;
  tail.segments.assign(5, 0);
  tail.q.erase(tail.q.begin(), tail.q.begin() + 4 * 30);
  tail.c.erase(tail.c.begin(), tail.c.begin() + 4 * 16);
  tail.k_pe.erase(tail.k_pe.begin(), tail.k_pe.begin() + 4 * 4);
  MeterCase head = m;
  head.segments.assign(4, 0);
  head.q.resize(4 * 30);
  head.c.resize(4 * 16);
  head.k_pe.resize(4 * 4);
  const HeadSums a = head.meter(options, layer), b = tail.meter(options, layer);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(after.cross[i], a.cross[i] + b.cross[i], kRounding * 10);
}

TEST(HeadMeter, ThreadsChangeNoBit) {
  const MeterCase m;
  const TplaLayer layer{.kappa = Values(6, 1), .rms_scale = {1, 1}};
  EXPECT_EQ(m.meter({.num_shards = 2}, layer, 1).cross, m.meter({.num_shards = 2}, layer, 3).cross);
}

}  // namespace
}  // namespace isomer
