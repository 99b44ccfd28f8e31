// The one-rank forward over a cut latent: against the float64 reference, where it must be exact, and against the loop
// of decode steps that it stands for.
#include "eval/sharded_forward.h"

#include <gmock/gmock.h>

#include "comm/group.h"
#include "convert/convert_fixture.h"
#include "layers/reference/tpla_attention.h"
#include "train/language_model.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::max_relative_difference;
using testing::message_of;
using testing::noise_values;
using testing::tensor_of;
using testing::values_of;
using Values = std::vector<double>;

struct AttentionCase {
  std::string name;
  LatentSharding sharding = LatentSharding::tpla;
  TplaOptions options;
  std::int64_t prefix = 0;
  testing::SmallModel model = {};
};

class ShardedAttentionTest : public ::testing::TestWithParam<AttentionCase> {};

TplaLayer random_scalars(const ModelConfig& config, int g) {
  return {.kappa = noise_values(21, config.num_attention_heads * g, 0.3, 1),
          .rms_scale = noise_values(22, g, 0.2, 1.5)};
}

/// The rows [begin, begin + count) of a matrix.
Values rows(const Values& values, std::int64_t width, std::int64_t begin, std::int64_t count) {
  return {values.begin() + begin * width, values.begin() + (begin + count) * width};
}

/// ĉ by the exact RMS, beside k_pe.
Values latent_of(const Values& c, const Values& k_pe, const Values& gamma, std::int64_t d, std::int64_t r) {
  Values latent;
  for (std::int64_t t = 0; t < std::ssize(c) / d; ++t) {
    double sum = 0;
    for (std::int64_t j = 0; j < d; ++j)
      sum += c[static_cast<std::size_t>(t * d + j)] * c[static_cast<std::size_t>(t * d + j)];
    const double scale = gamma.empty() ? 1 : 1 / std::sqrt(sum / static_cast<double>(d) + ModelConfig::kInnerNormEps);
    for (std::int64_t j = 0; j < d; ++j) {
      const double weight = gamma.empty() ? 1 : gamma[static_cast<std::size_t>(j)];
      latent.push_back(c[static_cast<std::size_t>(t * d + j)] * scale * weight);
    }
    for (std::int64_t j = 0; j < r; ++j) latent.push_back(k_pe[static_cast<std::size_t>(t * r + j)]);
  }
  return latent;
}

TEST_P(ShardedAttentionTest, EqualsTheReference) {
  const AttentionCase& p = GetParam();
  testing::SmallModel small = p.model;
  small.layers = 1;
  ModelConfig config = testing::small_config(small);
  if (p.sharding == LatentSharding::gla) config.num_attention_heads = 4;
  const std::int64_t h = config.num_attention_heads, d = config.kv_lora_rank, r = config.qk_rope_head_dim;
  const ModelWeights weights = testing::small_weights(config, DType::f64);
  const TplaLayer scalars = random_scalars(config, p.options.num_shards);
  ShardedForward forward({config, weights, p.options, {&scalars, 1}, p.sharding});
  // Two sequences side by side, of 9 and 4 tokens.
  const std::int64_t lengths[] = {9, 4}, q_width = h * config.qk_head_dim();
  const Values q = noise_values(7, 13 * q_width), c = noise_values(8, 13 * d, 1, 0.2), k_pe = noise_values(9, 13 * r);
  const Values gamma = small.kv_norm ? values_of(weights.layers[0].attention.kv_a_layernorm) : Values{};
  const Values kv_b = values_of(weights.layers[0].attention.kv_b_proj), latent = latent_of(c, k_pe, gamma, d, r);
  std::vector<ScoredSequence> sequences;
  for (const std::int64_t length : lengths) {
    sequences.push_back({.ids = std::vector<std::int32_t>(static_cast<std::size_t>(length), 1),
                         .exact_rows = std::min(length, p.prefix)});
  }
  Values got;
  run_group({}, [&](RankContext& ctx) {
    got = values_of(forward.attention(ctx, 0, sequences, tensor_of(q, DType::f64, {13, h, config.qk_head_dim()}),
                                      tensor_of(latent, DType::f64, {13, d + r}), tensor_of(c, DType::f64, {13, d})));
  });
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    const std::int64_t exact = std::min(length, p.prefix);
    const auto reference = [&](const TplaOptions& options, const TplaLayer& layer, std::int64_t first,
                               std::int64_t count, LatentSharding sharding) {
      const Values own_q = rows(q, q_width, begin + first, count), own_c = rows(c, d, begin, length);
      const Values own_k = rows(k_pe, r, begin, length);
      return tpla_attention_reference({.config = config,
                                       .options = options,
                                       .scalars = layer,
                                       .kv_b = kv_b,
                                       .gamma = gamma,
                                       .q = own_q,
                                       .c = own_c,
                                       .k_pe = own_k,
                                       .first_query = first,
                                       .exact_keys = exact,
                                       .sharding = sharding})
          .attention;
    };
    const TplaLayer one{.kappa = Values(static_cast<std::size_t>(h), 1), .rms_scale = {1}};
    Values expected = reference({.num_shards = 1}, one, 0, length, LatentSharding::tpla);
    const Values sharded = reference(p.options, scalars, exact, length - exact, p.sharding);
    std::copy(sharded.begin(), sharded.end(), expected.end() - std::ssize(sharded));
    const std::int64_t width = h * config.v_head_dim;
    // Another order of sums of some dozen terms, in float64.
    EXPECT_LE(max_relative_difference(rows(got, width, begin, length), expected), 1e-13);
    begin += length;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ShardedAttentionTest,
    ::testing::Values(AttentionCase{"plain", LatentSharding::tpla, {.num_shards = 2}},
                      AttentionCase{"prefix", LatentSharding::tpla, {.num_shards = 4}, 5},
                      AttentionCase{"shared", LatentSharding::tpla, {.num_shards = 3, .shared_columns = 4}, 3},
                      AttentionCase{"sliced", LatentSharding::tpla, {.num_shards = 2, .rms = TplaRms::sliced}, 4},
                      AttentionCase{"sliced_shared",
                                    LatentSharding::tpla,
                                    {.num_shards = 2, .shared_columns = 6, .rms = TplaRms::sliced}},
                      AttentionCase{"all_shared", LatentSharding::tpla, {.num_shards = 2, .shared_columns = 16}, 2},
                      AttentionCase{"no_norm", LatentSharding::tpla, {.num_shards = 2}, 2, {.kv_norm = false}},
                      AttentionCase{"no_rope", LatentSharding::tpla, {.num_shards = 2}, 2, {.rope = 0}},
                      AttentionCase{"gla", LatentSharding::gla, {.num_shards = 2}},
                      AttentionCase{"gla_prefix", LatentSharding::gla, {.num_shards = 4}, 6}),
    [](const auto& instance) { return instance.param.name; });

/// Whole models.
class ShardedModelTest : public ::testing::Test {
 protected:
  Values logits(const TplaOptions& options, LatentSharding sharding, const std::vector<ScoredSequence>& sequences) {
    const std::vector<TplaLayer> scalars(2, random_scalars(config_, options.num_shards));
    ShardedForward forward({config_, weights_, options, scalars, sharding});
    Values result;
    run_group({}, [&](RankContext& ctx) { result = values_of(forward.logits(ctx, sequences)); });
    return result;
  }
  Values training_logits(const ScoredSequence& s) {
    Values result;
    const auto length = s.ids.size();
    const Sample sample{s.ids, std::vector<std::int32_t>(length, -1), std::vector<std::int32_t>(length, 0), {}};
    run_group({}, [&](RankContext& ctx) {
      LanguageModel model(
          ctx, {.config = config_, .layout = parse_layout("explicit:1"), .seq = static_cast<std::int64_t>(length)});
      result = values_of(model.logits(ctx, weights_, {&sample, 1}));
    });
    return result;
  }
  static ScoredSequence sequence(std::int64_t length, std::int64_t exact) {
    ScoredSequence s{.exact_rows = exact};
    for (std::int64_t i = 0; i < length; ++i) s.ids.push_back(static_cast<std::int32_t>((i * 29 + 11) % 48));
    return s;
  }
  static constexpr std::int64_t kVocab = 48;
  // Two float32 forwards of two layers.
  static constexpr double kBound = 64 * 0x1p-23;
  ModelConfig config_ = testing::small_config({});
  ModelWeights weights_ = testing::small_weights(config_, DType::f32);
};

TEST_F(ShardedModelTest, ExactRowsAndOneShardAreTheTrainingForward) {
  const Values expected = training_logits(sequence(11, 0));
  EXPECT_LE(max_relative_difference(logits({.num_shards = 2}, LatentSharding::tpla, {sequence(11, 11)}), expected),
            kBound);
  EXPECT_LE(max_relative_difference(logits({.num_shards = 1}, LatentSharding::gla, {sequence(11, 4)}), expected),
            kBound);
  EXPECT_LE(max_relative_difference(
                logits({.num_shards = 4, .shared_columns = 16}, LatentSharding::tpla, {sequence(11, 4)}), expected),
            kBound);
  EXPECT_GT(max_relative_difference(logits({.num_shards = 2}, LatentSharding::tpla, {sequence(11, 4)}), expected),
            1e-3);
}

TEST_F(ShardedModelTest, OnePassEqualsTheLoopTokenByToken) {
  const TplaOptions options{.num_shards = 2, .shared_columns = 2, .rms = TplaRms::sliced};
  const Values pass = logits(options, LatentSharding::tpla, {sequence(12, 5), sequence(7, 0)});
  for (std::int64_t t = 5; t < 12; ++t) {
    const Values step = logits(options, LatentSharding::tpla, {sequence(t + 1, 5)});
    EXPECT_LE(max_relative_difference(rows(step, kVocab, t, 1), rows(pass, kVocab, t, 1)), kBound) << t;
  }
  const Values alone = logits(options, LatentSharding::tpla, {sequence(7, 0)});
  EXPECT_LE(max_relative_difference(rows(pass, kVocab, 12, 7), alone), kBound);
}

TEST_F(ShardedModelTest, AWholeSoftmaxLeavesOnlyTheRmsSliced) {
  const auto with = [&](TplaRms rms, int shards, std::int64_t exact_rows) {
    return logits({.num_shards = shards, .rms = rms}, LatentSharding::whole_softmax, {sequence(11, exact_rows)});
  };
  const Values expected = training_logits(sequence(11, 0));
  EXPECT_LE(max_relative_difference(with(TplaRms::exact, 2, 4), expected), kBound);
  const Values sliced = with(TplaRms::sliced, 2, 4);
  EXPECT_GT(max_relative_difference(sliced, expected), 1e-3);
  EXPECT_LE(max_relative_difference(rows(sliced, kVocab, 0, 4), rows(expected, kVocab, 0, 4)), kBound);
  // A shard's columns are normed by its own estimate: the scale of one shard moves its columns alone.
  EXPECT_GT(max_relative_difference(with(TplaRms::sliced, 4, 4), sliced), 1e-3);
}

TEST_F(ShardedModelTest, WrongInputIsNamed) {
  const auto why = [&](const TplaOptions& options, LatentSharding sharding, std::size_t layers) {
    const std::vector<TplaLayer> scalars(layers, random_scalars(config_, options.num_shards));
    return message_of([&] { ShardedForward({config_, weights_, options, scalars, sharding}); });
  };
  EXPECT_THAT(why({.num_shards = 3}, LatentSharding::tpla, 2), HasSubstr("--shards 3"));
  EXPECT_THAT(why({.num_shards = 2}, LatentSharding::tpla, 1), HasSubstr("scalars of 1 layers for a model of 2"));
  EXPECT_THAT(why({.num_shards = 2}, LatentSharding::gla, 0), HasSubstr("2 groups, 3 heads"));
  const ModelWeights narrow = testing::small_weights(config_, DType::bf16);
  EXPECT_THAT(message_of([&] {
                ShardedForward({config_, narrow, {.num_shards = 1}, {}, LatentSharding::gla});
              }),
              HasSubstr("float32"));
}

}  // namespace
}  // namespace isomer
