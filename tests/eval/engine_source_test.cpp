// Logits for evaluation by the inference engine: against the one-rank forward over a cut latent, and against the
// engine's own loop of single tokens.
#include "eval/engine_source.h"

#include <gtest/gtest.h>

#include "comm/group.h"
#include "convert/convert_fixture.h"
#include "eval/sharded_forward.h"

namespace isomer {
namespace {

using testing::max_relative_difference;
using testing::values_of;
using Values = std::vector<double>;

class EngineSourceTest : public ::testing::Test {
 protected:
  EngineSourceTest() {
    config_.num_attention_heads = config_.num_key_value_heads = 4;
    weights_ = testing::small_weights(config_, DType::f32);
    for (std::int64_t length : {13, 6, 5}) {
      ScoredSequence& s = sequences_.emplace_back();
      for (std::int64_t i = 0; i < length; ++i) s.ids.push_back(static_cast<std::int32_t>((i * 29 + 7 * length) % 48));
    }
    sequences_[0].exact_rows = 5;
    sequences_[1].exact_rows = 6;
  }
  EngineOptions options_of(const std::string& layout) const {
    EngineOptions options{.config = config_, .layout = parse_decode_layout(layout, config_)};
    if (options.layout.shards.scheme == DecodeScheme::tpla) options.tpla = std::make_shared<const TplaModel>(tpla_);
    options.layout = complete_layout(options.layout, options.tpla.get());
    options.page_tokens = 4;
    options.cache_tokens = window_cache_tokens(13, options.layout, options.page_tokens);
    return options;
  }
  Values by_engine(const std::string& layout) const {
    const EngineOptions options = options_of(layout);
    Values result;
    run_group({.num_ranks = options.layout.devices(), .threads_per_rank = 1}, [&](RankContext& ctx) {
      EngineSource source(ctx, options, weights_);
      source.logits(ctx, sequences_);  // a second call finds the cache as the first one did
      const Tensor logits = source.logits(ctx, sequences_);
      if (ctx.rank() == 0) result = values_of(logits);
    });
    return result;
  }
  Values by_forward(const TplaOptions& options, LatentSharding sharding) const {
    ShardedForward forward({config_, weights_, options, tpla_.layers, sharding});
    Values result;
    run_group({}, [&](RankContext& ctx) { result = values_of(forward.logits(ctx, sequences_)); });
    return result;
  }
  void set_tpla(const TplaOptions& options) {
    tpla_.options = options;
    tpla_.layers.clear();
    for (std::uint64_t layer = 0; layer < 2; ++layer) {
      tpla_.layers.push_back({.kappa = testing::noise_values(layer, 4 * options.num_shards, 0.3, 1),
                              .rms_scale = testing::noise_values(layer + 9, options.num_shards, 0.2, 1.5)});
    }
  }
  // Two float32 forwards of two layers, sums in other orders.
  static constexpr double kBound = 64 * 0x1p-23;
  ModelConfig config_ = testing::small_config({});
  ModelWeights weights_;
  std::vector<ScoredSequence> sequences_;
  TplaModel tpla_;
};

TEST_F(EngineSourceTest, AShardedLatentIsTheForwardOnOneRank) {
  const Values exact = by_forward({.num_shards = 1}, LatentSharding::gla);
  for (const TplaOptions& options :
       {TplaOptions{.num_shards = 2}, TplaOptions{.num_shards = 2, .shared_columns = 6, .rms = TplaRms::sliced}}) {
    set_tpla(options);
    const Values expected = by_forward(options, LatentSharding::tpla);
    EXPECT_LE(max_relative_difference(by_engine("tpla:g=2"), expected), kBound);
    EXPECT_GT(max_relative_difference(expected, exact), 1e-3);
  }
  const Values gla = by_forward({.num_shards = 2}, LatentSharding::gla);
  EXPECT_LE(max_relative_difference(by_engine("gla:2"), gla), kBound);
  EXPECT_GT(max_relative_difference(gla, exact), 1e-3);
}

TEST_F(EngineSourceTest, ExactLayoutsAreTheModel) {
  const Values exact = by_forward({.num_shards = 1}, LatentSharding::gla);
  for (const char* layout : {"tp:1", "tp:2", "kvp:2", "exact-latent:2"}) {
    EXPECT_LE(max_relative_difference(by_engine(layout), exact), kBound) << layout;
  }
}

TEST_F(EngineSourceTest, OneStepOfManyTokensIsTheLoopOfSingleOnes) {
  set_tpla({.num_shards = 2, .shared_columns = 2, .rms = TplaRms::sliced});
  const Values all = by_engine("tpla:g=2");
  const EngineOptions options = options_of("tpla:g=2");
  run_group({.num_ranks = 2, .threads_per_rank = 1}, [&](RankContext& ctx) {
    Engine engine(ctx, options, weights_);
    const int sequence = engine.add_sequence();
    const std::span<const std::int32_t> ids(sequences_[0].ids);
    engine.prefill(ctx, sequence, ids.first(5));
    for (std::size_t t = 5; t < ids.size(); ++t) {
      const Engine::Input input{sequence, ids.subspan(t, 1)};
      const Values row = values_of(engine.decode(ctx, {&input, 1}));
      const Values expected(all.begin() + static_cast<std::ptrdiff_t>(t) * 48,
                            all.begin() + static_cast<std::ptrdiff_t>(t + 1) * 48);
      EXPECT_LE(max_relative_difference(row, expected), kBound) << t;
    }
  });
}

TEST_F(EngineSourceTest, ABaseIsExactWhateverTheRanks) {
  const Values expected = by_forward({.num_shards = 1}, LatentSharding::gla);
  for (const int ranks : {1, 2}) {
    run_group({.num_ranks = ranks, .threads_per_rank = 1}, [&](RankContext& ctx) {
      PrefillSource source(ctx, config_, weights_, 13);
      const Tensor logits = source.logits(ctx, sequences_);
      EXPECT_EQ(logits.defined(), ctx.rank() == 0);
      if (ctx.rank() == 0) {
        EXPECT_LE(max_relative_difference(values_of(logits), expected), kBound);
      }
    });
  }
}

}  // namespace
}  // namespace isomer
