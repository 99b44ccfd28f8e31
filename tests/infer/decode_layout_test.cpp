// What decode layouts send and keep: against closed forms, real and dry; and that without communication they fail.
#include <gmock/gmock.h>

#include "engine_fixture.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::HasSubstr;

std::int64_t sent(RankContext& ctx, const std::string& tensor = {}) {
  std::int64_t bytes = 0;
  for (const LedgerEntry& entry : ctx.ledger().entries()) {
    if (tensor.empty() || entry.tensor == tensor) bytes += entry.bytes_sent;
  }
  return bytes;
}

/// What cost/decode_bytes.h says of one step of the rank's layers; `batch` new tokens, half of them of each of two
/// sequences, which go through a pipeline one after the other.
double step_bytes(const ModelConfig& c, const DecodeLayout& layout, int rank, std::int64_t batch, std::int64_t context,
                  std::int64_t element_bytes) {
  const int stage = rank / layout.stage_devices(), place = rank % layout.stage_devices();
  const IndexRange layers = balanced_part(c.num_hidden_layers, layout.pp, stage);
  const std::int64_t parts = layout.pp > 1 ? 2 : 1;
  double bytes = stage + 1 < layout.pp ? pipeline_elements(c, batch) * static_cast<double>(element_bytes) : 0;
  for (std::int64_t layer = layers.begin; layer < layers.end(); ++layer) {
    const bool moe = c.moe.n_routed_experts > 0 && layer >= c.moe.first_k_dense_replace;
    const auto attention = decode_attention_transfers(c, layout.shards, batch / parts, context, place);
    const auto ffn = decode_ffn_transfers(c, layout.shards, moe, batch / parts, place);
    bytes += static_cast<double>(parts) * (attention.bytes_sent(element_bytes) + ffn.bytes_sent(element_bytes));
  }
  return bytes;
}

/// Two sequences step from 9 cached tokens to 11 under a layout, real or dry.
void expect_closed_form(const ModelConfig& config, const ModelWeights& weights, const std::string& text, bool dry) {
  const DecodeLayout layout = parse_decode_layout(text, config);
  const GroupOptions group{.num_ranks = layout.devices(), .threads_per_rank = 1, .dry_run = dry};
  const DType dtype = weights.norm.dtype();
  run_group(group, [&](RankContext& ctx) {
    Engine engine(ctx, {.config = config, .layout = layout, .cache_tokens = 1024}, weights);
    const Ids ids = some_ids(11);
    const int a = engine.add_sequence(), b = engine.add_sequence();
    for (const int sequence : {a, b}) engine.prefill(ctx, sequence, std::span(ids).first(9));
    ctx.ledger().clear();
    const Engine::Input inputs[] = {{a, std::span(ids).subspan(9, 2)}, {b, std::span(ids).subspan(9, 2)}};
    engine.decode(ctx, inputs);
    EXPECT_EQ(static_cast<double>(ctx.ledger().bytes_sent(Phase::forward)),
              step_bytes(config, layout, ctx.rank(), 4, 11, size_of(dtype)))
        << config.name << " " << text << " rank " << ctx.rank() << (dry ? " dry" : "");
  });
}

TEST(DecodeLayouts, SendTheirClosedFormsRealAndDry) {
  for (const ModelConfig& config : {latent_config(), grouped_config()}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const ModelWeights weights = noisy_weights(config, dtype);
      for (const std::string& layout : all_layouts(config)) {
        for (const bool dry : {false, true}) expect_closed_form(config, weights, layout, dry);
      }
    }
  }
}

// Rows go to the ranks of their experts and come back, once a rank that has any; what is routed is counted.
TEST(DecodeLayouts, DataParallelSendsRowsToTheirExpertsAndBack) {
  ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  for (const bool dry : {false, true}) {
    std::vector<std::int64_t> dispatched(4), combined(4), columns(4);
    run_group({.num_ranks = 4, .threads_per_rank = 1, .dry_run = dry}, [&](RankContext& ctx) {
      Engine engine(ctx, {.config = config, .layout = parse_decode_layout("dp-ep:4", config), .cache_tokens = 64},
                    weights);
      const Ids ids = some_ids(8);
      std::vector<Engine::Input> inputs;
      for (std::size_t s = 0; s < 4; ++s) inputs.push_back({engine.add_sequence(), std::span(ids).subspan(2 * s, 2)});
      ctx.ledger().clear();
      engine.decode(ctx, inputs);
      const auto rank = static_cast<std::size_t>(ctx.rank());
      dispatched[rank] = sent(ctx, "dispatch");
      combined[rank] = sent(ctx, "combine");
      columns[rank] = sent(ctx, "ffn rows") + sent(ctx, "ffn output");
    });
    std::int64_t out = 0, back = 0;
    for (std::size_t rank = 0; rank < 4; ++rank) {
      out += dispatched[rank];
      back += combined[rank];
      EXPECT_EQ(dispatched[rank] % (40 * 4), 0);
      // Two own rows, at most to three others, in two layers of experts.
      EXPECT_LE(dispatched[rank], 2 * 2 * 3 * 40 * 4);
      // The dense layer: own rows to three ranks, partial sums of six rows of others.
      EXPECT_EQ(columns[rank], (3 * 2 + 6) * 40 * 4);
    }
    EXPECT_EQ(out, back);
    EXPECT_GT(out, 0);
  }
}

TEST(DecodeLayouts, CacheWhatTheTableSays) {
  const auto cache_bytes = [](const ModelConfig& config, const std::string& layout) {
    std::int64_t bytes = 0;
    const DecodeLayout parsed = parse_decode_layout(layout, config);
    const GroupOptions group{.num_ranks = parsed.devices(), .threads_per_rank = 1, .dry_run = true};
    run_group(group, [&](RankContext& ctx) {
      const ModelWeights weights = initial_model_weights(config, 1, DType::bf16, 0.02, true);
      const Engine engine(ctx, {.config = config, .layout = parsed, .cache_tokens = 1024}, weights);
      if (ctx.rank() == 0) bytes = ctx.memory().current_bytes(MemoryClass::cache);
    });
    return bytes / (1024 * config.num_hidden_layers * 2);
  };
  const ModelConfig latent = latent_config(), grouped = grouped_config();
  for (const char* layout : {"tp:1", "tp:4"}) EXPECT_EQ(cache_bytes(latent, layout), 24 + 8) << layout;
  EXPECT_EQ(cache_bytes(latent, "gla:g=2,tp=2"), 24 / 2 + 8);
  EXPECT_EQ(cache_bytes(latent, "exact-latent:2"), 24 / 2 + 8);
  EXPECT_EQ(cache_bytes(latent, "exact-latent:4,rope=split"), (24 + 8) / 4);
  EXPECT_EQ(cache_bytes(latent, "kvp:2"), (24 + 8) / 2);
  for (const char* layout : {"kvp:4", "helix:kvp=4,tpa=1", "medha:kvp=4,tpa=1"}) {
    EXPECT_EQ(cache_bytes(latent, layout), (24 + 8) / 4) << layout;
  }
  EXPECT_EQ(cache_bytes(latent, "helix:kvp=2,tpa=2"), (24 + 8) / 2);  // a copy a column
  EXPECT_EQ(cache_bytes(grouped, "helix:kvp=2,tpa=2"), 2 * 10 / 2);
  EXPECT_EQ(cache_bytes(grouped, "helix:kvp=2,tpa=4"), 2 * 10 / 2);
  EXPECT_EQ(cache_bytes(grouped, "tp:1"), 2 * 2 * 10);
  EXPECT_EQ(cache_bytes(grouped, "tp:2"), 2 * 10);
  EXPECT_EQ(cache_bytes(grouped, "tp:4"), 2 * 10);  // ⌈2/4⌉ KV heads: a copy
  EXPECT_EQ(cache_bytes(grouped, "kvp:4"), 2 * 2 * 10 / 4);
}

// The prefix travels to prefill under kvp: blocks of cached rows, once for every chunk that reads them.
TEST(DecodeLayouts, KvpPrefillGathersTheRowsItReads) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  run_group({.num_ranks = 2, .threads_per_rank = 1}, [&](RankContext& ctx) {
    Engine engine(
        ctx,
        {.config = config, .layout = parse_decode_layout("kvp:2", config), .cache_tokens = 256, .prefill_chunk = 40},
        weights);
    const Ids ids = some_ids(72);
    engine.prefill(ctx, engine.add_sequence(), ids);
    const CacheShards shards{2};
    const std::int64_t rows = shards.count(ctx.rank(), 40) + shards.count(ctx.rank(), 72);
    EXPECT_EQ(sent(ctx, "prefix keys"), config.num_hidden_layers * rows * (24 + 8) * 4);
  });
}

TEST(DecodeLayouts, FailWithoutCommunication) {
  for (const ModelConfig& config : {latent_config(), grouped_config()}) {
    const ModelWeights weights = noisy_weights(config, DType::f32);
    const Ids ids = some_ids(60);
    const auto expected = reference_logits(config, ids);
    for (const std::string layout :
         {"tp:2", "kvp:2", "exact-latent:2", "helix:kvp=2,tpa=1", "medha:kvp=2,tpa=1", "pp:2", "dp-ep:2"}) {
      if (!why_step_unfit(parse_decode_layout(layout, config), config).empty()) continue;
      for (const bool prefill : {false, true}) {
        std::vector<double> got;
        with_engine({.layout = layout}, config, weights, 60, [&](RankContext& ctx, Engine& engine) {
          ctx.comm().drop_transfers(true);
          const int sequence = engine.add_sequence();
          const Engine::Input input{sequence, ids};
          const Tensor logits =
              prefill ? engine.prefill(ctx, sequence, ids, LogitRows::all) : engine.decode(ctx, {&input, 1});
          if (ctx.rank() == 0) got = values_of(logits);
        });
        // NaN, where a poisoned buffer was read, is a failure too.
        EXPECT_GT(max_relative_difference(got, expected), 1e-2) << config.name << " " << layout;
      }
    }
  }
}

template <class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(DecodeLayouts, ComplaintsSayWhatWouldFit) {
  const ModelConfig latent = latent_config(), grouped = grouped_config();
  const auto unfit = [](const std::string& layout, const ModelConfig& config) {
    return message_of([&] {
      const std::string reason = why_step_unfit(parse_decode_layout(layout, config), config);
      if (!reason.empty()) invalid_argument("{}", reason);
    });
  };
  EXPECT_THAT(unfit("tp:3", latent), HasSubstr("4 heads can't be spread over 3 ranks; these numbers of ranks fit"));
  EXPECT_THAT(unfit("tp:3", latent), HasSubstr(": 1, 2, 4"));
  EXPECT_THAT(unfit("kvp:5", grouped), HasSubstr("8 heads with 2 KV heads"));
  EXPECT_THAT(unfit("tp:16", grouped), HasSubstr("1, 2, 4, 8"));
  EXPECT_THAT(unfit("tp:2,dp-ep:2", latent), HasSubstr("there are: tp, "));
  EXPECT_THAT(unfit("dp-ep:4,tpf=2,ep=2", latent), HasSubstr("take ep=4 or tpf=4"));
  EXPECT_THAT(unfit("helix:kvp=4,tpa=2", latent), HasSubstr("kvp=4 slices of tpa=2 columns are 8 ranks"));
  EXPECT_THAT(unfit("helix:kvp=4,tpa=2", latent), HasSubstr("these fit: tpa=1 kvp≤4, tpa=2 kvp≤2"));
  EXPECT_THAT(unfit("helix:kvp=2,tpa=2,tpf=2,ep=4", latent), HasSubstr("tpf=4,ep=1; tpf=2,ep=2; tpf=1,ep=4"));
  EXPECT_THAT(unfit("medha:kvp=4,tpa=1,tpf=4", latent), HasSubstr("1 columns, to which the FFN is tied"));
  EXPECT_THAT(unfit("tp:2,q=gather", latent), HasSubstr("tp has no option 'q'"));
  EXPECT_THAT(unfit("tp:2,pp:4", latent), HasSubstr("a pipeline of 4 stages needs a layer for each"));
  EXPECT_THAT(unfit("tp:2,ep=2", grouped), HasSubstr("small-grouped has no experts"));
  EXPECT_THAT(unfit("tp:4,ep=3", latent), HasSubstr("tpf=1 and ep=3 are 3 ranks, the attention has 4"));
  EXPECT_THAT(unfit("gla:g=2", grouped), HasSubstr("grouped-query, without one; take tp or kvp"));
  EXPECT_THAT(unfit("exact-latent:5", latent),
              HasSubstr("24 columns (kv_lora_rank 24 less 0 shared) don't divide by 5"));
  ModelConfig thin = latent;
  thin.num_attention_heads = 32;
  EXPECT_THAT(unfit("tp:32", thin), HasSubstr("an FFN of width 18 can't be spread over 32 ranks; take at most 18"));
}

// Wrong input changes nothing: the step after it gives what it would have given.
TEST(Engine, RefusesWhatItCannotDoAndLosesNothing) {
  ModelConfig config = latent_config();
  config.max_position_embeddings = 100;
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const Ids ids = some_ids(31);
  for (const char* layout : {"tp:1", "kvp:2"}) {
    const auto undisturbed = engine_logits({.layout = layout, .prompt = 30}, config, weights, ids);
    with_engine({.layout = layout, .page_tokens = 16}, config, weights, 64, [&](RankContext& ctx, Engine& engine) {
      const int sequence = engine.add_sequence(), other = engine.add_sequence();
      const std::span<const std::int32_t> all(ids);
      engine.prefill(ctx, sequence, all.first(30));
      const Ids wrong = {1, 61}, many = some_ids(71), few = some_ids(60);
      const auto refused = [&](int to, const Ids& what) { return message_of([&] { engine.prefill(ctx, to, what); }); };
      EXPECT_THAT(refused(sequence, {}), HasSubstr("has no new tokens"));
      EXPECT_THAT(refused(sequence, wrong), HasSubstr("token 61 is outside the vocabulary of 61 tokens"));
      EXPECT_THAT(refused(sequence, many), HasSubstr("71 tokens after 30 go beyond the 100 positions"));
      EXPECT_THAT(refused(other, few), HasSubstr("the cache is too small: 60 more tokens beside 30"));
      EXPECT_THAT(refused(77, few), HasSubstr("no sequence 77"));
      const Engine::Input twice[] = {{sequence, all.subspan(30, 1)}, {sequence, all.subspan(30, 1)}};
      EXPECT_THAT(message_of([&] { engine.decode(ctx, twice); }), HasSubstr("twice"));
      EXPECT_THAT(message_of([&] { engine.decode(ctx, {}); }), HasSubstr("without sequences"));
      const auto logits = values_of(engine.decode(ctx, {twice, 1}));
      EXPECT_EQ(logits, std::vector<double>(undisturbed.end() - 61, undisturbed.end()));
      engine.truncate(ctx, sequence, 30);
      EXPECT_EQ(values_of(engine.decode(ctx, {twice, 1})), logits);
    });
  }
  EXPECT_THAT(message_of([&] {
                with_engine({.cache_dtype = DType::bf16}, config, noisy_weights(config, DType::f64), 64,
                            [](RankContext&, Engine&) {});
              }),
              HasSubstr("a cache of bf16 does not go with weights of f64"));
  EXPECT_THAT(message_of([&] { with_engine({}, config, weights, 0, [](RankContext&, Engine&) {}); }),
              HasSubstr("number of tokens is 0"));
}

}  // namespace
}  // namespace isomer
