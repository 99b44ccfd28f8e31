// One truth: what the planner's closed forms say of a training layout is what a dry run of the scheme itself counts, on
// every rank: bytes by phase, messages, FLOPs by phase, saved bytes, and what stands in the core's backward.
#include <gtest/gtest.h>

#include "cost/scheme_bytes.h"
#include "cost/scheme_work.h"
#include "parallel/sequence/scheme.h"
#include "plan/random_choice.h"
#include "sharding/sequence_layout.h"
#include "study/block_run.h"

namespace isomer {
namespace {

struct Case {
  BlockProblem problem;
  std::string layout;  // every axis with its size
  int ranks() const { return sequence_ranks_of(parse_layout(layout)); }
  std::string text() const {
    const ModelConfig& c = problem.config;
    return fmt::format("{}, {} x {} tokens, {}, h {} kv {} D {} q {} d {} n {} r {} v {} w {} norm {} bias {}", layout,
                       problem.seq, problem.batch, name_of(problem.dtype), c.num_attention_heads, c.num_key_value_heads,
                       c.hidden_size, c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim,
                       c.v_head_dim, c.head_dim, c.kv_a_layernorm, c.attention_bias);
  }
};

BlockRun dry_run(const Case& c) {
  const BlockProblem& p = c.problem;
  const Shape shape{p.seq * p.batch, p.config.hidden_size};
  const BlockData data{.weights = seeded_attention_weights(p.config, 1, p.dtype, true),
                       .x = seeded_tensor(1, "x", shape, p.dtype, 1.0, true),
                       .dy = seeded_tensor(1, "dy", shape, p.dtype, 1.0, true)};
  BlockRunOptions options;
  options.group.num_ranks = c.ranks();
  options.group.threads_per_rank = 1;
  options.group.dry_run = true;
  return run_block(p, data, parse_layout(c.layout), options);
}

/// Tensors at the peak, kernel scratch apart.
std::int64_t standing_bytes(const RankMeasure& m) {
  std::int64_t bytes = 0;
  for (const StandingTensor& t : m.standing_at_peak) {
    if (!t.name.starts_with("attention.")) bytes += t.bytes;
  }
  return bytes;
}

/// Nothing is copied inside a group of one rank, so that tensors are shared and less is kept.
bool shares_tensors(const Layout& layout) {
  const SequenceLayout axes = sequence_layout(layout);
  return axes.inner_ranks == 1 && (axes.outer_groups == 1 || !keeps_all_heads(axes.scheme));
}

/// Returns what was run.
BlockRun expect_one_truth(const Case& c) {
  BlockRun run = dry_run(c);
  EXPECT_EQ(run.ranks.size(), static_cast<std::size_t>(c.ranks()));
  const BlockProblem& p = c.problem;
  const Layout layout = sized_layout(parse_layout(c.layout), c.ranks());
  const SchemeCase block{layout, p.config, p.seq, p.batch, p.dtype};
  for (const RankMeasure& m : run.ranks) {
    const SchemeBytes bytes = scheme_bytes_sent(block, m.rank);
    const SchemeWork work = scheme_work(block, m.rank);
    EXPECT_EQ(m.bytes_forward, bytes.forward) << c.text();
    EXPECT_EQ(m.bytes_backward, bytes.backward) << c.text();
    EXPECT_EQ(m.bytes_gradient_sync, gradient_sync_bytes_sent(layout, p.config, m.rank)) << c.text();
    EXPECT_EQ(m.messages, work.messages) << c.text();
    EXPECT_EQ(m.flops_forward, work.flops_forward) << c.text();
    EXPECT_EQ(m.flops_backward, work.flops_backward) << c.text();
    if (shares_tensors(layout)) continue;
    EXPECT_EQ(m.saved_bytes, work.saved_bytes) << c.text();
    EXPECT_GE(m.peak_activation_bytes, work.core_backward_bytes) << c.text();
  }
  return run;
}

ModelConfig random_config(Random& random, int inner, AttentionKind attention) {
  ModelConfig c;
  c.name = "random";
  c.attention = attention;
  c.num_attention_heads = c.num_key_value_heads = inner * random.between(1, 4);
  c.hidden_size = random.between(1, 90);
  c.attention_bias = random.coin();
  c.num_hidden_layers = 1;
  c.vocab_size = 256;
  if (random.coin()) c.scale_depth = 1.5;
  if (attention == AttentionKind::gqa) {
    c.head_dim = 2 * random.between(1, 20);
    c.model_type = random.coin() ? "qwen2" : "llama";
    do c.num_key_value_heads = random.between(1, c.num_attention_heads);
    while (c.num_attention_heads % c.num_key_value_heads != 0);
    return c;
  }
  c.q_lora_rank = random.coin() ? random.between(1, 50) : 0;
  c.kv_lora_rank = random.between(1, 70);
  c.qk_nope_head_dim = random.between(1, 40);
  c.qk_rope_head_dim = 2 * random.between(0, 16);
  c.v_head_dim = random.between(1, 50);
  c.kv_a_layernorm = random.coin();
  return c;
}

/// Options of a scheme besides recomputation.
std::vector<std::string> variants_of(std::string_view scheme, Random& random) {
  const std::string base(scheme), rows = fmt::format(",rows={}", random.between(1, 30));
  if (scheme == "laga") return {base, base + ",kv=view", base + ",v=view", base + ",recompute=up-projection"};
  if (scheme == "ring") return {base, base + ",recompute=up-projection"};
  if (scheme == "latent-gather") return {base, base + ",kv=kept", base + rows, base + ",kv=kept" + rows};
  if (scheme == "latent-ring") return {base, base + rows};
  if (scheme == "laga,ring") return {base, "laga,kv=rebuild,ring", "laga,kv=view,ring"};
  if (scheme == "laga,latent-ring") return {base, base + rows};
  return {base};
}

/// `scheme` with sizes: its first axis, and the second if it has one.
std::string sized(const std::string& scheme, int inner, int groups) {
  Layout layout = parse_layout(scheme);
  layout.axes.front().size = inner;
  if (layout.axes.size() > 1) layout.axes[1].size = groups;
  return to_string(layout);
}

/// Returns how many layouts were looked at.
int expect_random_layouts(AttentionKind attention, unsigned seed, int rounds) {
  Random random(seed);
  int cases = 0;
  for (int i = 0; i < rounds; ++i) {
    for (const std::string_view scheme : schemes_with_work(attention)) {
      for (const std::string& variant : variants_of(attention == AttentionKind::mla ? scheme : "", random)) {
        const bool two_axes = parse_layout(scheme).axes.size() > 1;
        const int inner = static_cast<int>(random.between(two_axes ? 2 : 1, two_axes ? 4 : 8));
        const int groups = two_axes ? static_cast<int>(random.between(1, 4)) : 1;
        std::string text(variant.empty() ? scheme : variant);
        if (text.find("recompute") == std::string::npos) {
          const auto choice = random.between(0, 2);
          text += choice == 1 ? ",recompute=attention" : choice == 2 ? ",recompute=block" : "";
        }
        const Case c{.problem = {.config = random_config(random, inner, attention),
                                 .dtype = random.coin() ? DType::bf16 : DType::f32,
                                 .seq = random.between(inner * groups, 60),
                                 .batch = random.between(1, 3)},
                     .layout = sized(text, inner, groups)};
        expect_one_truth(c);
        if (testing::Test::HasFailure()) return cases;
        ++cases;
      }
    }
  }
  return cases;
}

TEST(OneTruth, RandomLayoutsAndShapes) { EXPECT_GE(expect_random_layouts(AttentionKind::mla, 20261129, 25), 500); }

TEST(OneTruth, RandomLayoutsOfGroupedQueryAttention) {
  EXPECT_GE(expect_random_layouts(AttentionKind::gqa, 405, 60), 180);
}

struct Published {
  const char* model;
  bool wide;  // attention against the hidden state, so that the core's backward is the peak of every scheme
};

TEST(OneTruth, PeaksOfPublishedModels) {
  Random random(7);
  for (const auto& [model, wide] :
       {Published{"deepseek-v3", true}, Published{"deepseek-v2-lite", true}, Published{"kimi-k2", true},
        Published{"minicpm3", true}, Published{"llama-3.1-405b", true}}) {
    const ModelConfig config = load_model_config(model);
    for (const std::string_view scheme : schemes_with_work(config.attention)) {
      const bool two_axes = parse_layout(scheme).axes.size() > 1;
      for (const int ranks : {2, 4, 8}) {
        const Case c{.problem = {.config = config,
                                 .dtype = random.coin() ? DType::bf16 : DType::f32,
                                 .seq = random.between(1000, 40000),
                                 .batch = random.between(1, 2)},
                     .layout = sized(std::string(scheme), two_axes ? 2 : ranks, two_axes ? ranks : 1)};
        const BlockRun run = expect_one_truth(c);
        const Layout layout = parse_layout(c.layout);
        for (const RankMeasure& m : run.ranks) {
          if (!wide) continue;
          const SchemeCase block{layout, config, c.problem.seq, c.problem.batch, c.problem.dtype};
          EXPECT_EQ(standing_bytes(m), scheme_work(block, m.rank).core_backward_bytes) << c.text();
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(OneTruth, EveryClosedFormBelongsToAScheme) {
  for (const char* model : {"deepseek-v3", "llama-3.1-405b"}) {
    const ModelConfig config = load_model_config(model);
    const auto& names = sequence_scheme_names(config.attention);
    for (const std::string_view scheme : schemes_with_work(config.attention)) {
      const std::string name = parse_layout(scheme).innermost().name;
      EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << scheme;
    }
    for (const std::string& name : names) {  // and every scheme has one
      const Layout layout = parse_layout(name + ":2");
      EXPECT_GT(scheme_work({layout, config, 8, 1, DType::bf16}, 0).flops_forward, 0) << name;
    }
    const Layout unknown = parse_layout("ulysses:2");
    EXPECT_THROW(scheme_work({unknown, config, 8, 1, DType::bf16}, 0), std::invalid_argument);
  }
}

}  // namespace
}  // namespace isomer
