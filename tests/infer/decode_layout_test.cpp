// What decode layouts send and keep: against closed forms, real and dry; and that without communication they fail.
#include <gmock/gmock.h>

#include "engine_fixture.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::EndsWith;
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

/// One step of as many sequences as `tokens`, each with so many new ones, under dp-ep. By rank: bytes by tensor's name,
/// and the rows of its own that visit each rank's experts, of all layers, as the router chose.
struct DataParallelStep {
  std::vector<std::map<std::string, std::int64_t>> bytes;
  std::vector<std::vector<std::int64_t>> visits;

  /// Rows that leave a rank for others' experts, and rows of others that come to its own.
  RoutedRows routed(std::size_t rank) const {
    RoutedRows rows;
    for (std::size_t other = 0; other < visits.size(); ++other) {
      if (other == rank) continue;
      rows.sent += static_cast<double>(visits[rank][other]);
      rows.received += static_cast<double>(visits[other][rank]);
    }
    return rows;
  }
};
DataParallelStep data_parallel_step(const ModelConfig& config, const ModelWeights& weights, const std::string& layout,
                                    const std::vector<std::int64_t>& tokens, bool dry) {
  const DecodeLayout parsed = parse_decode_layout(layout, config);
  const int ranks = parsed.devices();
  const auto size = static_cast<std::size_t>(ranks);
  DataParallelStep result{.bytes = std::vector<std::map<std::string, std::int64_t>>(size),
                          .visits = std::vector(size, std::vector<std::int64_t>(size))};
  run_group({.num_ranks = ranks, .threads_per_rank = 1, .dry_run = dry}, [&](RankContext& ctx) {
    auto& visits = result.visits[static_cast<std::size_t>(ctx.rank())];
    const auto enter = [&](const std::vector<std::int32_t>& experts) {
      const auto rows = rows_by_device(experts, config.moe.num_experts_per_tok, config.moe.n_routed_experts, ranks);
      for (std::size_t rank = 0; rank < rows.size(); ++rank) visits[rank] += rows[rank];
    };
    Engine engine(ctx, {.config = config, .layout = parsed, .cache_tokens = 1024}, weights);
    const Ids ids = some_ids(40);
    std::vector<Engine::Input> inputs;
    std::int64_t mine = 0;
    for (std::size_t s = 0; s < tokens.size(); ++s) {
      inputs.push_back({engine.add_sequence(), std::span(ids).subspan(3 * s, static_cast<std::size_t>(tokens[s]))});
      if (engine.cache().owns(inputs.back().sequence)) mine += tokens[s];
    }
    ctx.ledger().clear();
    ctx.set_observer([&](std::string_view name, const Tensor& t) {
      if (name.ends_with(".experts")) enter({t.data<float>(), t.data<float>() + t.numel()});
    });
    engine.decode(ctx, inputs);
    for (std::int64_t l = config.moe.first_k_dense_replace; dry && l < config.num_hidden_layers; ++l) {
      enter(dry_routing(config, l, ctx.rank(), mine).experts);
    }
    for (const LedgerEntry& entry : ctx.ledger().entries()) {
      if (entry.phase == Phase::forward && entry.group_size > 1) {
        result.bytes[static_cast<std::size_t>(ctx.rank())][entry.tensor] += entry.bytes_sent;
      }
    }
  });
  return result;
}

// Rows go to the ranks of their experts and come back, once to a rank that has any, for sequences dealt evenly or not.
TEST(DecodeLayouts, DataParallelSendsRowsToTheirExpertsAndBack) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const std::int64_t row = config.hidden_size * 4;
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{2, 2, 2, 2}, {1, 3, 1, 1, 2, 1}, {1, 2}}) {
    for (const bool dry : {false, true}) {
      const DataParallelStep step = data_parallel_step(config, weights, "dp-ep:4", tokens, dry);
      std::vector<std::int64_t> own(4);
      for (std::size_t s = 0; s < tokens.size(); ++s) own[s % 4] += tokens[s];
      const std::int64_t all = own[0] + own[1] + own[2] + own[3];
      double travelled = 0;
      for (std::size_t rank = 0; rank < 4; ++rank) {
        const RoutedRows rows = step.routed(rank);
        const auto& bytes = step.bytes[rank];
        EXPECT_EQ(static_cast<double>(bytes.at("dispatch")), rows.sent * static_cast<double>(row));
        EXPECT_EQ(static_cast<double>(bytes.at("combine")), rows.received * static_cast<double>(row));
        EXPECT_EQ(bytes.at("row counts"), 2 * 3 * 4);  // two layers of experts, one number a peer
        // The dense layer: own rows to three ranks, partial sums of all others' rows back.
        EXPECT_EQ(bytes.at("ffn rows"), 3 * own[rank] * row);
        EXPECT_EQ(bytes.at("ffn output"), (all - own[rank]) * row);
        EXPECT_EQ(bytes.size(), 5u);
        travelled += rows.sent;
      }
      EXPECT_GT(travelled, 0);
      EXPECT_LE(travelled, static_cast<double>(2 * all * 2));  // two experts a row and layer
    }
  }
}

TEST(DecodeLayouts, DataParallelSendsItsClosedForm) {
  for (const auto& [config, layout] : std::vector<std::pair<ModelConfig, std::string>>{
           {latent_config(), "dp-ep:4"}, {latent_config(), "dp-ep:2,tpf=2"}, {grouped_config(), "dp-ep:3"}}) {
    const DecodeLayout parsed = parse_decode_layout(layout, config);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const ModelWeights weights = noisy_weights(config, dtype);
      for (const bool dry : {false, true}) {
        const DataParallelStep step = data_parallel_step(config, weights, layout, {1, 1, 1, 1, 1}, dry);
        for (std::size_t rank = 0; rank < step.bytes.size(); ++rank) {
          const RoutedRows rows = step.routed(rank);
          const double moe_layers = config.moe.n_routed_experts > 0 ? 2 : 0;
          const RoutedRows of_layer{rows.sent / 2, rows.received / 2};
          const auto bytes_of = [&](bool moe) {
            return decode_ffn_transfers(config, parsed.shards, moe, 5, static_cast<int>(rank), &of_layer)
                .bytes_sent(static_cast<double>(size_of(dtype)));
          };
          double sent = 0;
          for (const auto& [name, bytes] : step.bytes[rank]) sent += static_cast<double>(bytes);
          EXPECT_DOUBLE_EQ(sent, (3 - moe_layers) * bytes_of(false) + moe_layers * bytes_of(true))
              << config.name << " " << layout << " rank " << rank << (dry ? " dry" : "");
        }
      }
    }
  }
}

// A row's experts are chosen at its own rank, and again where it arrives: together the ranks compute each row's two
// experts once, none left out or counted twice, with experts as close as float32 has them.
TEST(DecodeLayouts, DataParallelRanksComputeEveryExpertOnce) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  for (std::size_t layer = 1; layer < 3; ++layer) {
    float* gate = weights.layers[layer].moe.gate.data<float>();
    for (std::int64_t e = 1; e < 8; ++e) {
      for (std::int64_t i = 0; i < 40; ++i) {
        gate[e * 40 + i] = gate[i] * static_cast<float>(1 + 1e-7 * noise(5, static_cast<std::uint64_t>(e * 40 + i)));
      }
    }
    std::fill_n(weights.layers[layer].moe.e_score_correction_bias.data<float>(), 8, 0.0f);
  }
  std::vector<double> flops(4);
  run_group({.num_ranks = 4, .threads_per_rank = 1}, [&](RankContext& ctx) {
    Engine engine(ctx, {.config = config, .layout = parse_decode_layout("dp-ep:4", config), .cache_tokens = 1024},
                  weights);
    const Ids ids = some_ids(52);
    std::vector<Engine::Input> inputs;
    for (std::size_t s = 0; s < 4; ++s) inputs.push_back({engine.add_sequence(), std::span(ids).subspan(13 * s, 13)});
    engine.decode(ctx, inputs);
    for (const auto& [key, summary] : ctx.ops().summaries()) {
      if (key.name == "experts up_proj") flops[static_cast<std::size_t>(ctx.rank())] += summary.cost.flops;
    }
  });
  // 52 rows, two experts each, in two layers: products of 40 by 18.
  EXPECT_EQ(flops[0] + flops[1] + flops[2] + flops[3], 52.0 * 2 * 2 * 2 * 40 * 18);
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
  EXPECT_THAT(unfit("helix:kvp=4,tpa=2", latent), EndsWith("these fit: tpa=1 kvp≤4, tpa=2 kvp≤2, tpa=3 to 4 kvp≤1"));
  EXPECT_THAT(unfit("helix:kvp=2,tpa=2,tpf=2,ep=4", latent), HasSubstr("tpf=4,ep=1; tpf=2,ep=2; tpf=1,ep=4"));
  EXPECT_THAT(unfit("helix:kvp=4,tpa=1,tpf=3,ep=1", grouped), EndsWith("these fit: tpf=4,ep=1"));
  EXPECT_THAT(unfit("medha:kvp=4,tpa=1,tpf=4", latent), HasSubstr("1 columns, to which the FFN is tied"));
  EXPECT_THAT(unfit("tp:2,q=gather", latent), HasSubstr("tp has no option 'q'; it has: tpf, ep"));
  EXPECT_THAT(unfit("helix:kvp=2,tpa=1,kpv=2", latent), HasSubstr("has no option 'kpv'; it has: kvp, tpa, q, "));
  for (const std::string option : {"wuv=before", "q=gather,absorb=before"}) {
    EXPECT_EQ(unfit("helix:kvp=2,tpa=1," + option, latent), "accepted");
    EXPECT_THAT(unfit("helix:kvp=2,tpa=1," + option, grouped),
                AllOf(HasSubstr("before: it says when latent attention is up-projected"), HasSubstr("leave it out")));
  }
  EXPECT_THAT(unfit("helx:kvp=2,tpa=1", latent),
              HasSubstr("'helx' is unknown; did you mean helix? There are: tp, gla, "));
  EXPECT_THAT(unfit("laga:2", latent), AllOf(HasSubstr("'laga' is unknown"), HasSubstr("dp-ep, and pp behind any")));
  EXPECT_THAT(unfit("", latent), HasSubstr("such as helix:kvp=2,tpa=1, got ''"));
  EXPECT_THAT(unfit("tp:2,pp:4", latent), HasSubstr("a pipeline of 4 stages needs a layer for each"));
  EXPECT_THAT(unfit("tp:2,ep=2", grouped), HasSubstr("small-grouped has no experts"));
  EXPECT_THAT(unfit("tp:4,ep=3", latent), HasSubstr("tpf=1 and ep=3 are 3 ranks, the attention has 4"));
  EXPECT_THAT(unfit("gla:g=2", grouped), HasSubstr("grouped-query, without one; take tp or kvp"));
  EXPECT_THAT(unfit("exact-latent:5", latent),
              HasSubstr("24 columns (kv_lora_rank 24 less 0 shared) don't divide by 5"));
  ModelConfig many = latent;
  many.num_attention_heads = 128;
  EXPECT_THAT(unfit("helix:kvp=65,tpa=2", many), AllOf(HasSubstr("tpa=1 kvp≤128, tpa=2 kvp≤64, "), EndsWith(", …")));
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
