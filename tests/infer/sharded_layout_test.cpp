// The layouts that are not exact, gla and tpla, against the float64 reference of what they compute
// (layers/reference/tpla_attention.h); what they send; and checkpoints that they refuse.
#include <gmock/gmock.h>

#include "engine_fixture.h"
#include "full_tests.h"
#include "infer/generate.h"
#include "layers/reference/ffn.h"
#include "layers/reference/head.h"
#include "layers/reference/tpla_attention.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr std::int64_t kTokens = 40;

struct ShardedCase {
  std::string layout;
  TplaOptions options;  // g, m, RMS
  LatentSharding sharding = LatentSharding::tpla;
};

/// Scalars off 1, another for every layer, head and shard.
std::shared_ptr<const TplaModel> some_side_file(const ModelConfig& config, const TplaOptions& options) {
  TplaModel model{.options = options, .layers = {}};
  const auto g = static_cast<std::size_t>(options.num_shards);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const auto seed = static_cast<std::uint64_t>(100 + l);
    TplaLayer layer;
    layer.kappa = noise_values(seed, config.num_attention_heads * options.num_shards, 0.1, 1);
    layer.rms_scale = noise_values(seed + 50, options.num_shards, 0.1, static_cast<double>(g));
    layer.shares.assign(g, 1.0 / static_cast<double>(g));
    layer.moments.assign(static_cast<std::size_t>(config.kv_lora_rank), 1);
    model.layers.push_back(layer);
  }
  return std::make_shared<const TplaModel>(model);
}

/// Logits [T·V] of positions from `prefix` on as the layout gives them, those before exact.
std::vector<double> sharded_reference(const ModelConfig& config, const Ids& ids, std::int64_t prefix,
                                      const TplaModel& tpla, LatentSharding sharding) {
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const auto named = widened_model_weights(weights);
  const auto hidden = static_cast<std::size_t>(config.hidden_size);
  std::vector<double> x;
  for (const std::int32_t id : ids) {
    const auto row =
        named.at("model.embed_tokens.weight").begin() + static_cast<std::ptrdiff_t>(id) * config.hidden_size;
    x.insert(x.end(), row, row + static_cast<std::ptrdiff_t>(hidden));
  }
  for (std::size_t l = 0; l < weights.layers.size(); ++l) {
    MlaReferenceWeights block;
    for (const MlaReferenceWeight& weight : mla_reference_weights(config)) {
      const auto found = named.find(fmt::format("model.layers.{}.{}", l, weight.name));
      if (found != named.end()) block.*weight.member = found->second;
    }
    x = tpla_block_reference(config, block, tpla.options, tpla.layers[l], x, prefix, sharding, 2);
    x = ffn_reference(config, widened_ffn_weights(weights.layers[l]), x, {}).y;
  }
  return head_reference(config, named.at("model.norm.weight"), named.at("lm_head.weight"), x, Ids(ids.size(), 0), 1)
      .logits;
}

std::vector<ShardedCase> cases() {
  const auto options = [](int g, std::int64_t m, TplaRms rms) {
    return TplaOptions{.num_shards = g, .shared_columns = m, .rms = rms};
  };
  std::vector<ShardedCase> list = {
      {"gla:g=2", options(2, 0, TplaRms::exact), LatentSharding::gla},
      {"tpla:g=2", options(2, 0, TplaRms::exact)},
      {"tpla:g=2,tp=2", options(2, 8, TplaRms::sliced)},
      {"tpla:g=2,wo=scatter", options(2, 8, TplaRms::exact)},
  };
  if (full_tests()) {
    list.push_back({"gla:g=2,tp=2", options(2, 0, TplaRms::exact), LatentSharding::gla});
    list.push_back({"gla:g=4", options(4, 0, TplaRms::exact), LatentSharding::gla});
    for (const std::int64_t m : {0, 4, 24}) {
      for (const TplaRms rms : {TplaRms::exact, TplaRms::sliced}) {
        list.push_back({"tpla:g=4", options(4, m, rms)});
        list.push_back({"tpla:g=2", options(2, m, rms)});
        list.push_back({"tpla:g=4,wo=scatter", options(4, m, rms)});
      }
    }
    list.push_back({"tpla:g=2,ep=2", options(2, 0, TplaRms::sliced)});
  }
  return list;
}

TEST(ShardedLayouts, GiveWhatTheirReferenceSays) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const Ids ids = some_ids(kTokens);
  const auto exact = reference_logits(config, ids);
  for (const ShardedCase& c : cases()) {
    const auto tpla = some_side_file(config, c.options);
    for (const std::int64_t prefix : {0, 17}) {
      const auto expected = sharded_reference(config, ids, prefix, *tpla, c.sharding);
      const auto got =
          engine_logits({.layout = c.layout, .prompt = prefix, .prefill_chunk = 10, .steps = {1, 3}, .tpla = tpla},
                        config, weights, ids);
      const std::string which = fmt::format("{}, m={}, {} RMS, {} tokens by prefill", c.layout,
                                            c.options.shared_columns, name_of(c.options.rms), prefix);
      EXPECT_LT(max_relative_difference(got, expected), 1e-11) << which;
      const auto cut = static_cast<std::ptrdiff_t>(prefix * config.vocab_size);
      EXPECT_LT(max_relative_difference({got.begin(), got.begin() + cut}, {exact.begin(), exact.begin() + cut}), 1e-11)
          << which;
      // With every column on every rank nothing is cut, and only an RMS that is estimated differs.
      const bool whole = c.options.shared_columns == config.kv_lora_rank && c.options.rms == TplaRms::exact;
      const double error = max_relative_difference(got, exact);
      EXPECT_TRUE(whole ? error < 1e-11 : error > 1e-3) << which << ": decode is off by " << error;
    }
  }
}

// Every shard has all heads, and a prefill deals them as they go.
TEST(ShardedLayouts, NeedNoNumberOfHeadsThatDivides) {
  ModelConfig config = latent_config();
  config.num_attention_heads = config.num_key_value_heads = 3;
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const Ids ids = some_ids(kTokens);
  const auto exact = reference_logits(config, ids);
  for (const std::int64_t prefix : {0, 17}) {
    const auto latent =
        engine_logits({.layout = "exact-latent:2", .prompt = prefix, .prefill_chunk = 10}, config, weights, ids);
    EXPECT_LT(max_relative_difference(latent, exact), 1e-11);
    const TplaOptions options{.num_shards = 2};
    const auto tpla = some_side_file(config, options);
    const auto got = engine_logits({.layout = "tpla:g=2", .prompt = prefix, .prefill_chunk = 10, .tpla = tpla}, config,
                                   weights, ids);
    const auto expected = sharded_reference(config, ids, prefix, *tpla, LatentSharding::tpla);
    EXPECT_LT(max_relative_difference(got, expected), 1e-11);
  }
  const auto side = some_side_file(config, {.num_shards = 4});
  EXPECT_THAT(why_step_unfit(parse_decode_layout("tpla:g=4", config), config, side.get()),
              HasSubstr("4 ranks are more than the 3 heads"));
  EXPECT_THAT(why_step_unfit(parse_decode_layout("tpla:g=2,wo=scatter", config), config,
                             some_side_file(config, {.num_shards = 2}).get()),
              HasSubstr("3 heads"));
}

// One shard of all columns with κ = 1 is latent attention itself.
TEST(ShardedLayouts, OneShardIsExact) {
  const ModelConfig config = latent_config();
  TplaModel one{.options = {.num_shards = 1}, .layers = {}};
  one.layers.assign(static_cast<std::size_t>(config.num_hidden_layers),
                    {.kappa = std::vector<double>(4, 1), .rms_scale = {1}, .shares = {1}, .moments = {}});
  const Ids ids = some_ids(kTokens);
  const auto got = engine_logits({.layout = "tpla:g=1,tp=2", .tpla = std::make_shared<const TplaModel>(one)}, config,
                                 noisy_weights(config, DType::f64), ids);
  EXPECT_LT(max_relative_difference(got, reference_logits(config, ids)), 1e-11);
}

TEST(ShardedLayouts, SendAndCacheTheirClosedForms) {
  const ModelConfig config = latent_config();
  for (const ShardedCase& c : cases()) {
    const auto tpla = some_side_file(config, c.options);
    const DecodeLayout layout = complete_layout(parse_decode_layout(c.layout, config), tpla.get());
    const ModelWeights weights = noisy_weights(config, DType::bf16);
    for (const bool dry : {false, true}) {
      run_group({.num_ranks = layout.devices(), .threads_per_rank = 1, .dry_run = dry}, [&](RankContext& ctx) {
        Engine engine(ctx, {.config = config, .layout = layout, .tpla = tpla, .cache_tokens = 64}, weights);
        const int sequence = engine.add_sequence();
        const Ids ids = some_ids(12);
        engine.prefill(ctx, sequence, std::span(ids).first(9));
        ctx.ledger().clear();
        const Engine::Input input{sequence, std::span(ids).subspan(9, 3)};
        engine.decode(ctx, {&input, 1});
        std::int64_t sent = 0;
        for (const LedgerEntry& entry : ctx.ledger().entries()) sent += entry.bytes_sent;
        double expected = 0;
        for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
          expected += decode_attention_transfers(config, layout.shards, 3, 12, ctx.rank()).bytes_sent(2);
          expected += decode_ffn_transfers(config, layout.shards, layer > 0, 3, ctx.rank()).bytes_sent(2);
        }
        EXPECT_EQ(static_cast<double>(sent), expected) << c.layout << " rank " << ctx.rank();
        EXPECT_EQ(
            static_cast<double>(ctx.memory().current_bytes(MemoryClass::cache)),
            64.0 * static_cast<double>(config.num_hidden_layers) * 2 * decode_cache_elements(config, layout.shards))
            << c.layout;
      });
    }
  }
}

// A cache that another layout's prefill filled is the one that tpla's own prefill leaves.
TEST(ShardedLayouts, TakeTheCacheOfAnExactPrefill) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const auto tpla = some_side_file(config, {.num_shards = 2, .shared_columns = 8, .rms = TplaRms::sliced});
  const std::vector<TextRequest> requests = {{some_ids(45, 31), 12}, {some_ids(9, 32), 5}};
  const auto options = [&](const std::string& layout) {
    return EngineOptions{
        .config = config, .layout = parse_decode_layout(layout, config), .tpla = tpla, .cache_tokens = 200};
  };
  std::vector<Ids> expected;
  run_group({.num_ranks = 2, .threads_per_rank = 1}, [&](RankContext& ctx) {
    Engine engine(ctx, options("tpla:g=2"), weights);
    const auto tokens = generate(ctx, engine, requests).tokens;
    if (ctx.rank() == 0) expected = tokens;
  });
  for (const std::string prefill : {"tp:1", "kvp:2"}) {
    SeparatedOptions separated{.prefill = options(prefill), .decode = options("tpla:g=2"), .apart = true};
    run_group({.num_ranks = separated.num_ranks(), .threads_per_rank = 1}, [&](RankContext& ctx) {
      const Generated result = generate_separated(ctx, separated, weights, requests);
      if (ctx.rank() >= 2) return;
      EXPECT_EQ(result.tokens, expected) << prefill;
    });
  }
}

TEST(ShardedLayouts, RefuseCheckpointsThatDoNotFit) {
  const ModelConfig config = latent_config();
  const auto side = some_side_file(config, {.num_shards = 2, .shared_columns = 8});
  const auto why = [&](const std::string& layout, const TplaModel* tpla) {
    return why_step_unfit(complete_layout(parse_decode_layout(layout, config), tpla), config, tpla);
  };
  EXPECT_EQ(why("tpla:g=2", side.get()), "");
  EXPECT_THAT(why("tpla:g=2", nullptr), HasSubstr("no side file of a conversion (tpla.json)"));
  EXPECT_THAT(why("tpla:g=2", nullptr), HasSubstr("isomer convert tpla --shards 2"));
  EXPECT_THAT(why("tpla:g=4", side.get()), HasSubstr("converted for 2 shards and 8 shared columns"));
  EXPECT_THAT(why("tpla:g=2,m=4", side.get()), HasSubstr("the layout has 2 and 4"));
  EXPECT_THAT(why("tpla:g=2,rms=reduce", side.get()), HasSubstr("rms=reduce is priced by the planner alone"));
  EXPECT_THAT(why("tpla:g=2,tp=2,wo=scatter", side.get()), HasSubstr("wo=scatter"));
}

}  // namespace
}  // namespace isomer
