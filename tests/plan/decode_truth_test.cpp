// One truth: what the planner says of a decode layout is what a dry run of the engine counts: bytes and messages by
// collective, FLOPs by operation, weights, cache; and a workspace that the engine's peak stays under. Two things differ
// by intent (docs/planner.md, One truth): the engine keeps the head whole on every rank, and the router of dp-ep runs
// again on the rows that come in.
#include <gtest/gtest.h>

#include "plan/decode_cut.h"
#include "plan/decode_enumerate.h"
#include "plan/decode_operations.h"
#include "plan/hardware.h"
#include "plan/random_choice.h"
#include "study/compare_decode.h"

namespace isomer {
namespace {

struct Case {
  ModelConfig config;
  DecodeLayout layout;
  std::int64_t context = 0, batch = 0;  // `context`: rows a sequence, the step's own among them
  std::string text() const {
    const ModelConfig& c = config;
    return fmt::format(
        "{}, batch {}, {} rows, h {} kv {} D {} I {} layers {}, q {} d {} n {} r {} v {} w {}, experts {} of {}, "
        "{} shared, first {} dense",
        to_string(layout), batch, context, c.num_attention_heads, c.num_key_value_heads, c.hidden_size,
        c.intermediate_size, c.num_hidden_layers, c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim,
        c.v_head_dim, c.head_dim, c.moe.num_experts_per_tok, c.moe.n_routed_experts, c.moe.n_shared_experts,
        c.moe.first_k_dense_replace);
  }
};

/// Bytes, messages and FLOPs by what they are for.
using Account = std::map<std::string, double>;

/// The engine's own account, of one rank.
struct Counted {
  Account flops;  // multiply-adds: "core", "projections", "dense", "experts", "shared", "router", "head"
  double attention_weights = 0, dense_weights = 0, moe_weights = 0;  // elements of one layer; 0 without such layers
  std::int64_t bytes = 0, messages = 0, cache_bytes = 0, peak_bytes = 0;
};

const std::map<std::string, std::string>& engine_operations() {
  static const std::map<std::string, std::string> parts = {{"q_proj", "projections"},
                                                           {"k_proj", "projections"},
                                                           {"v_proj", "projections"},
                                                           {"q_a_proj", "projections"},
                                                           {"q_b_proj", "projections"},
                                                           {"kv_a_proj latent", "projections"},
                                                           {"kv_a_proj rope", "projections"},
                                                           {"absorb q", "projections"},
                                                           {"W_UV õ", "projections"},
                                                           {"o_proj", "projections"},
                                                           {"fused_attention_forward", "core"},
                                                           {"partial logits", "core"},
                                                           {"p ĉ", "core"},
                                                           {"gate_proj", "dense"},
                                                           {"up_proj", "dense"},
                                                           {"down_proj", "dense"},
                                                           {"experts gate_proj", "experts"},
                                                           {"experts up_proj", "experts"},
                                                           {"experts down_proj", "experts"},
                                                           {"shared gate_proj", "shared"},
                                                           {"shared up_proj", "shared"},
                                                           {"shared down_proj", "shared"},
                                                           {"router gate", "router"},
                                                           {"lm_head", "head"}};
  return parts;
}

double elements_of(const LayerWeights& layer, bool attention) {
  double attention_elements = 0, all = 0;
  ModelWeights one;
  one.layers.push_back(layer);
  one.for_each([&](const std::string&, const Tensor& t) { all += static_cast<double>(t.numel()); });
  layer.attention.for_each(
      [&](std::string_view, const Tensor& t) { attention_elements += t ? static_cast<double>(t.numel()) : 0; });
  return attention ? attention_elements : all - attention_elements;
}

std::shared_ptr<const TplaModel> side_file(const ModelConfig& c, const DecodeShards& s) {
  if (s.scheme != DecodeScheme::tpla) return nullptr;
  TplaModel model{.options = {.num_shards = s.latent_shards, .shared_columns = s.shared_columns}, .layers = {}};
  TplaLayer layer{.kappa = std::vector<double>(static_cast<std::size_t>(s.latent_shards * c.num_attention_heads), 1),
                  .rms_scale = std::vector<double>(static_cast<std::size_t>(s.latent_shards), 1)};
  model.layers.assign(static_cast<std::size_t>(c.num_hidden_layers), layer);
  return std::make_shared<const TplaModel>(model);
}

GroupOptions dry_group(const DecodeLayout& layout) {
  GroupOptions group;
  group.num_ranks = layout.devices();
  group.threads_per_rank = 1;
  group.dry_run = true;
  return group;
}

/// FFN weights that rank 0 has of the first layer of each kind.
void count_ffn_weights(const Case& c, const ModelWeights& weights, const TplaModel* tpla, Counted& counted) {
  run_group(dry_group(c.layout), [&](RankContext& ctx) {
    const Pipeline pipeline(ctx.comm(), c.layout, c.config);
    const auto scheme = make_step_scheme({pipeline.ranks_of_stage(), c.layout, c.config, tpla});
    if (ctx.rank() != 0) return;
    const DecodeModel model = cut_model(c.config, weights, *scheme, 0);
    for (const LayerWeights& layer : model.explicit_part.weights.layers) {
      (layer.is_moe() ? counted.moe_weights : counted.dense_weights) = elements_of(layer, false);
    }
  });
}

DecodeRun dry_run(const Case& c, const ModelWeights& weights, const std::shared_ptr<const TplaModel>& tpla) {
  const DecodeWorkload w{
      .config = c.config, .tpla = tpla, .dtype = DType::bf16, .context = c.context - 1, .batch = c.batch, .tokens = 1};
  DecodeRunOptions run{.group = dry_group(c.layout), .layout = c.layout};
  run.read = {std::vector<std::int32_t>(static_cast<std::size_t>(c.batch), 1)};
  return run_decode(w, weights, run);
}

/// Of rank 0; FLOPs of experts, which routing deals unevenly, are an average over ranks.
Counted counted_by_engine(const Case& c) {
  const auto tpla = side_file(c.config, c.layout.shards);
  const ModelWeights weights = initial_model_weights(c.config, 1, DType::bf16, 0.02, true);
  Counted counted;
  count_ffn_weights(c, weights, tpla.get(), counted);
  const DecodeRun run = dry_run(c, weights, tpla);
  const DecodeMeasure& m = run.ranks.front();
  for (const auto& [name, flops] : m.flops_by_name) {
    if (const auto found = engine_operations().find(name); found != engine_operations().end()) {
      counted.flops[found->second] += flops;
    }
  }
  double experts = 0;
  for (const DecodeMeasure& rank : run.ranks) {
    for (const auto& [name, flops] : rank.flops_by_name) {
      if (name.starts_with("experts ") && name.ends_with("_proj")) experts += flops;
    }
  }
  const int roots = c.layout.shards.scheme == DecodeScheme::medha ? c.layout.shards.tpa : c.layout.stage_devices();
  counted.flops["experts"] = experts / roots / c.layout.pp;
  counted.bytes = m.bytes_sent();
  counted.messages = m.messages;
  counted.cache_bytes = m.cache_bytes;
  counted.peak_bytes = m.peak_activation_bytes;
  return counted;
}

struct Planned {
  Account flops;
  double bytes = 0, cache_bytes = 0, workspace_bytes = 0;
  std::int64_t messages = 0;
  DecodeWeights weights;
};

std::string part_of(const DecodeOperations& operations, const std::vector<Operation>& list, const Operation& op) {
  if (op.kind == OperationKind::decode_mla || op.kind == OperationKind::decode_gqa) return "core";
  if (op.kind == OperationKind::moe) return "experts";
  if (&list == &operations.dense_ffn) return "dense";
  if (&list == &operations.ends) return "head";
  if (op.name == "router") return "router";
  return op.name.starts_with("shared") ? "shared" : "projections";
}

/// One device's, of the first stage.
Planned planned(const Case& c) {
  static const Hardware hardware = load_hardware("h200");
  const DecodeProblem problem{.config = c.config, .context = c.context, .precision = {}};
  DecodeOperations ops;
  decode_operations(problem, hardware, c.layout, c.batch, ops);
  const StageLayers stage = stage_layers(c.config, c.layout.pp);
  const bool hop_b = c.layout.shards.scheme == DecodeScheme::helix && c.layout.hop_b;
  Planned p;
  const auto add = [&](const std::vector<Operation>& list, std::int64_t times) {
    for (const Operation& op : list) {
      const auto repeated = static_cast<double>(times * op.count * c.layout.pp);
      if (const double flops = cost_of(op).flops; flops > 0) p.flops[part_of(ops, list, op)] += repeated * flops;
      // The root of medha gets partials, and sends none.
      if (!is_collective(op.kind) || (c.layout.shards.scheme == DecodeScheme::medha && op.name == "partials")) continue;
      p.bytes += repeated * cost_of(op).bytes_written;
      const std::int64_t parts = &list == &ops.exchange && hop_b ? c.batch / c.layout.pp : 1;  // a sequence each
      p.messages += times * op.count * c.layout.pp * parts * messages_of(op);
    }
  };
  for (const auto* list : {&ops.attention, &ops.core, &ops.exchange}) add(*list, stage.dense + stage.moe);
  add(ops.dense_ffn, stage.dense);
  add(ops.moe_ffn, stage.moe);
  add(ops.ends, 1);
  if (c.layout.pp > 1) add(ops.boundary, 1);
  const DecodeMemory memory = decode_memory(problem, hardware, c.layout, c.batch);
  p.cache_bytes = memory.cache;
  p.workspace_bytes = memory.workspace;
  p.weights = decode_weights(c.config, c.layout.shards);
  return p;
}

/// Elements of one layer's attention by what is multiplied with them: FLOPs / (2 · rows), and the norms.
double attention_elements(const Case& c, double projection_flops) {
  const ModelConfig& m = c.config;
  const auto layers = static_cast<double>(m.num_hidden_layers / c.layout.pp);
  const auto rows = static_cast<double>(c.batch / c.layout.shards.data_parallel);
  const std::int64_t norms =
      m.hidden_size + (m.attention == AttentionKind::mla ? m.q_lora_rank + (m.kv_a_layernorm ? m.kv_lora_rank : 0) : 0);
  return projection_flops / layers / rows / 2 + static_cast<double>(norms);
}

/// Where rows travel to experts routing decides how many; that many come is told in a message of its own, and nothing
/// is sent where no row goes.
void expect_same_exchanges(const Case& c, const Counted& counted, const Planned& p) {
  if (!is_routed(c.layout) || counted.moe_weights == 0) {
    EXPECT_EQ(p.messages, counted.messages);
    EXPECT_NEAR(p.bytes, static_cast<double>(counted.bytes), 1e-9 * p.bytes);
    return;
  }
  const std::int64_t others = c.layout.shards.devices() - 1, layers = stage_layers(c.config, c.layout.pp).moe;
  const std::int64_t rows = c.batch / c.layout.shards.data_parallel;
  const std::int64_t row_counts = layers * others;
  EXPECT_LE(counted.messages, p.messages + row_counts);
  EXPECT_GE(counted.messages, p.messages + row_counts - 2 * layers * others);
  if (rows < 500) return;  // enough that every device gets some, and that their number is near its mean
  EXPECT_EQ(counted.messages, p.messages + row_counts);
  EXPECT_NEAR(p.bytes, static_cast<double>(counted.bytes), 0.02 * p.bytes);
}

void expect_one_truth(const Case& c) {
  SCOPED_TRACE(c.text());
  const Counted counted = counted_by_engine(c);
  const Planned p = planned(c);
  const DecodeShards& s = c.layout.shards;
  const bool routed = is_routed(c.layout) && c.config.moe.n_routed_experts > 0;
  for (const char* part : {"core", "projections", "dense", "shared", "experts"}) {
    const auto of = [&](const Account& account) { return account.contains(part) ? account.at(part) : 0.0; };
    EXPECT_NEAR(of(p.flops), of(counted.flops), 1e-12 * of(counted.flops)) << part;
  }
  if (!routed && p.flops.contains("router")) {
    EXPECT_EQ(p.flops.at("router"), counted.flops.at("router"));
  }
  // Whole at every rank of the engine, whose ranks all get the logits of all sequences.
  EXPECT_NEAR(p.flops.at("head") * s.devices(), counted.flops.at("head"), 1e-12 * counted.flops.at("head"));

  EXPECT_NEAR(p.weights.attention, attention_elements(c, counted.flops.at("projections")), 0.5);
  if (counted.dense_weights > 0) {
    EXPECT_EQ(p.weights.dense_ffn, counted.dense_weights);
  }
  if (counted.moe_weights > 0) {
    EXPECT_EQ(p.weights.moe_ffn, counted.moe_weights);
  }
  EXPECT_EQ(p.cache_bytes, static_cast<double>(counted.cache_bytes));
  // Whole logits of all sequences, and under data parallelism their hidden states, before and after they are ordered.
  const std::int64_t whole_logits =
      c.batch * (4 * c.config.vocab_size + (s.data_parallel > 1 ? 4 * c.config.hidden_size : 0));
  const double workspace = p.workspace_bytes + static_cast<double>(whole_logits);
  EXPECT_LE(static_cast<double>(counted.peak_bytes), workspace);
  EXPECT_GE(static_cast<double>(counted.peak_bytes), 0.1 * workspace);

  expect_same_exchanges(c, counted, p);
}

constexpr int kMostDevices = 8;

ModelConfig random_config(Random& random, AttentionKind attention) {
  ModelConfig c;
  c.name = "random";
  c.attention = attention;
  c.num_attention_heads = c.num_key_value_heads = kMostDevices * random.between(1, 3);
  c.hidden_size = kMostDevices * random.between(1, 6);
  c.intermediate_size = random.between(kMostDevices, 90);
  c.num_hidden_layers = 4;
  c.vocab_size = kMostDevices * 16;
  if (attention == AttentionKind::gqa) {
    c.model_type = "llama";
    c.head_dim = 2 * random.between(1, 20);
    c.num_key_value_heads = std::int64_t{1} << random.between(0, 3);
  } else {
    c.q_lora_rank = random.coin() ? random.between(1, 50) : 0;
    c.kv_lora_rank = kMostDevices * random.between(1, 5);
    c.qk_nope_head_dim = random.between(1, 40);
    c.qk_rope_head_dim = kMostDevices * random.between(1, 2);
    c.v_head_dim = random.between(1, 50);
    c.kv_a_layernorm = random.coin();
  }
  if (random.coin()) {
    c.moe.n_routed_experts = kMostDevices * random.between(1, 3);
    c.moe.num_experts_per_tok = random.between(1, 8);
    c.moe.moe_intermediate_size = random.between(kMostDevices, 30);
    c.moe.n_shared_experts = random.between(0, 2);
    c.moe.first_k_dense_replace = random.between(0, 3);
  }
  return c;
}

/// Layouts of the search, and what only text can say.
std::vector<DecodeLayout> layouts_of(const ModelConfig& c) {
  std::vector<DecodeLayout> layouts = enumerate_decode_layouts(c, kMostDevices);
  std::vector<std::string> more = {"kvp:4,chunk=5", "helix:kvp=3,tpa=2", "helix:kvp=2,tpa=3,hopb=off,chunk=1",
                                   "medha:kvp=5,tpa=1"};
  if (c.attention == AttentionKind::mla) {
    for (const char* text : {"gla:g=2,tp=1", "gla:g=2,tp=4", "exact-latent:4,rope=split", "tpla:g=4,tp=2"}) {
      more.emplace_back(text);
    }
  }
  for (const std::string& text : more) layouts.push_back(parse_decode_layout(text, c));
  return layouts;
}

/// A stage's layers must be as many and of the same kinds, or the planner prices the slowest for all.
bool has_equal_stages(const DecodeLayout& layout, const ModelConfig& c) {
  if (layout.pp == 1) return true;
  return c.num_hidden_layers % layout.pp == 0 && (c.moe.n_routed_experts == 0 || c.moe.first_k_dense_replace == 0);
}

/// Even shares of every exchange, so that a device's part of the buffer is one N-th.
bool has_even_shares(const DecodeLayout& layout, const ModelConfig& c) {
  return c.num_attention_heads % layout.stage_devices() == 0 && c.hidden_size % layout.stage_devices() == 0;
}

/// Returns how many layouts were looked at, by family.
std::map<std::string, int> expect_random_layouts(AttentionKind attention, unsigned seed, int configs, int of_each) {
  Random random(seed);
  std::map<std::string, int> looked_at;
  for (int i = 0; i < configs; ++i) {
    const ModelConfig config = random_config(random, attention);
    std::map<std::string, std::vector<DecodeLayout>> by_family;
    for (const DecodeLayout& layout : layouts_of(config)) {
      const auto tpla = side_file(config, layout.shards);
      if (why_unfit(layout, config) != Unfit::fits || !why_step_unfit(layout, config, tpla.get()).empty()) continue;
      if (!has_equal_stages(layout, config) || !has_even_shares(layout, config)) continue;
      const std::string family = std::string(layout.family()) + (layout.pp > 1 ? ",pp" : "");
      by_family[family].push_back(layout);
    }
    for (const auto& [family, layouts] : by_family) {
      for (int k = 0; k < of_each; ++k) {
        const DecodeLayout& layout = random.one_of(layouts);
        const std::int64_t groups = layout.pp * layout.shards.data_parallel;
        expect_one_truth({.config = config,
                          .layout = layout,
                          .context = random.between(layout.shards.kvp, 300),
                          .batch = groups * random.between(1, 3)});
        ++looked_at[family];
        // DEBUG        if (testing::Test::HasFailure()) return looked_at;
      }
    }
  }
  return looked_at;
}

TEST(DecodeTruth, RandomLayoutsOfLatentAttention) {
  const auto looked_at = expect_random_layouts(AttentionKind::mla, 20261130, 10, 4);
  int all = 0;
  for (const auto& [family, count] : looked_at) all += count;
  for (const char* family : {"tp", "gla", "tpla", "exact-latent", "kvp", "medha", "helix", "dp-ep", "helix,pp"}) {
    EXPECT_TRUE(looked_at.contains(family)) << family;
  }
  EXPECT_GE(all, 300);
}

TEST(DecodeTruth, RandomLayoutsOfGroupedQueryAttention) {
  const auto looked_at = expect_random_layouts(AttentionKind::gqa, 405, 10, 4);
  for (const char* family : {"tp", "kvp", "medha", "helix", "dp-ep", "tp,pp"}) {
    EXPECT_TRUE(looked_at.contains(family)) << family;
  }
}

TEST(DecodeTruth, PublishedModels) {
  for (const char* model : {"deepseek-r1", "llama-3.1-405b", "kimi-k2"}) {
    ModelConfig config = load_model_config(model);
    config.num_hidden_layers = 2;
    config.moe.first_k_dense_replace = config.moe.n_routed_experts > 0 ? 1 : 0;
    for (const char* text : {"tp:8", "kvp:8", "medha:kvp=8,tpa=1", "helix:kvp=8,tpa=1", "helix:kvp=4,tpa=2,q=gather",
                             "dp-ep:8", "helix:kvp=16,tpa=1,tpf=4,ep=4,experts=gather"}) {
      const DecodeLayout layout = parse_decode_layout(text, config);
      if (!why_step_unfit(layout, config).empty()) continue;
      const std::int64_t batch = is_routed(layout) ? 8 * 512 : 16;
      expect_one_truth({.config = config, .layout = layout, .context = 100000, .batch = batch});
    }
  }
}

/// Shares of heads and sums that differ by one: the planner's device has the largest, its bytes are an N-th each.
TEST(DecodeTruth, UnevenHeadsAreTheFirstDevices) {
  ModelConfig c = load_model_config("tiny-mla");
  c.attention = AttentionKind::gqa;
  c.model_type = "llama";
  c.num_attention_heads = 9;
  c.num_key_value_heads = 3;
  c.head_dim = 8;
  c.hidden_size = 60;
  c.intermediate_size = 31;
  c.moe = {};
  for (const char* text : {"helix:kvp=2,tpa=1", "helix:kvp=2,tpa=2", "medha:kvp=3,tpa=2", "helix:kvp=4,tpa=1"}) {
    const Case one{.config = c, .layout = parse_decode_layout(text, c), .context = 77, .batch = 3};
    ASSERT_EQ(why_unfit(one.layout, c), Unfit::fits) << text;
    const Counted counted = counted_by_engine(one);
    const Planned p = planned(one);
    EXPECT_EQ(p.flops.at("core"), counted.flops.at("core")) << text;
    EXPECT_EQ(p.flops.at("projections"), counted.flops.at("projections")) << text;
    EXPECT_EQ(p.flops.at("dense"), counted.flops.at("dense")) << text;
    EXPECT_EQ(p.messages, counted.messages) << text;
    EXPECT_EQ(p.cache_bytes, static_cast<double>(counted.cache_bytes)) << text;
    EXPECT_EQ(p.weights.dense_ffn, counted.dense_weights) << text;
  }
  EXPECT_EQ(why_unfit(parse_decode_layout("helix:kvp=10,tpa=1", c), c), Unfit::heads);
  EXPECT_EQ(why_unfit(parse_decode_layout("tp:2", c), c), Unfit::heads);
}

}  // namespace
}  // namespace isomer
