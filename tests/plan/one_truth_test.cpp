// One truth: what the planner's closed forms say of a training layout is what a dry run of the scheme itself counts, on
// every rank: bytes by phase, messages, FLOPs by phase, saved bytes, and what stands in the core's backward.
#include <gtest/gtest.h>

#include <random>

#include "cost/scheme_bytes.h"
#include "cost/scheme_work.h"
#include "parallel/sequence/scheme.h"
#include "sharding/sequence_layout.h"
#include "study/block_run.h"

namespace isomer {
namespace {

struct Case {
  BlockProblem problem;
  std::string scheme;
  int ranks = 1;
  std::string text() const {
    const ModelConfig& c = problem.config;
    return fmt::format("{} on {} ranks, {} x {} tokens, {}, h {} D {} q {} d {} n {} r {} v {} norm {} bias {}", scheme,
                       ranks, problem.seq, problem.batch, name_of(problem.dtype), c.num_attention_heads, c.hidden_size,
                       c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
                       c.kv_a_layernorm, c.attention_bias);
  }
};

BlockRun dry_run(const Case& c) {
  const BlockProblem& p = c.problem;
  const Shape shape{p.seq * p.batch, p.config.hidden_size};
  const BlockData data{.weights = seeded_attention_weights(p.config, 1, p.dtype, true),
                       .x = seeded_tensor(1, "x", shape, p.dtype, 1.0, true),
                       .dy = seeded_tensor(1, "dy", shape, p.dtype, 1.0, true)};
  BlockRunOptions options;
  options.group.num_ranks = c.ranks;
  options.group.threads_per_rank = 1;
  options.group.dry_run = true;
  return run_block(p, data, parse_layout(c.scheme), options);
}

/// Tensors at the peak, kernel scratch apart.
std::int64_t standing_bytes(const RankMeasure& m) {
  std::int64_t bytes = 0;
  for (const StandingTensor& t : m.standing_at_peak) {
    if (!t.name.starts_with("attention.")) bytes += t.bytes;
  }
  return bytes;
}

void expect_one_truth(const Case& c) {
  const BlockRun run = dry_run(c);
  ASSERT_EQ(run.ranks.size(), static_cast<std::size_t>(c.ranks));
  const BlockProblem& p = c.problem;
  const TokenShards tokens{p.seq, p.batch, c.ranks};
  const Layout layout = sized_layout(parse_layout(c.scheme), c.ranks);
  for (const RankMeasure& m : run.ranks) {
    const SchemeBytes bytes = scheme_bytes_sent({layout, p.config, p.seq, p.batch, p.dtype}, m.rank);
    const SchemeWork work = scheme_work(c.scheme, p.config, tokens, p.dtype, m.rank);
    EXPECT_EQ(m.bytes_forward, bytes.forward) << c.text();
    EXPECT_EQ(m.bytes_backward, bytes.backward) << c.text();
    EXPECT_EQ(m.bytes_gradient_sync, gradient_sync_bytes_sent(layout, p.config, m.rank)) << c.text();
    EXPECT_EQ(m.messages, work.messages) << c.text();
    EXPECT_EQ(m.flops_forward, work.flops_forward) << c.text();
    EXPECT_EQ(m.flops_backward, work.flops_backward) << c.text();
    if (c.ranks == 1) continue;  // nothing is copied, so that tensors are shared and less is kept
    EXPECT_EQ(m.saved_bytes, work.saved_bytes) << c.text();
    EXPECT_GE(m.peak_activation_bytes, work.core_backward_bytes) << c.text();
  }
}

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(generator_);
  }
  bool coin() { return between(0, 1) == 1; }

 private:
  std::mt19937 generator_;
};

ModelConfig random_config(Random& random, int ranks) {
  ModelConfig c;
  c.name = "random";
  c.num_attention_heads = c.num_key_value_heads = ranks * random.between(1, 4);
  c.hidden_size = random.between(1, 90);
  c.q_lora_rank = random.coin() ? random.between(1, 50) : 0;
  c.kv_lora_rank = random.between(1, 70);
  c.qk_nope_head_dim = random.between(1, 40);
  c.qk_rope_head_dim = 2 * random.between(1, 16);
  c.v_head_dim = random.between(1, 50);
  c.kv_a_layernorm = random.coin();
  c.attention_bias = random.coin();
  c.num_hidden_layers = 1;
  c.vocab_size = 256;
  return c;
}

TEST(OneTruth, RandomLayoutsAndShapes) {
  Random random(20261129);
  int cases = 0;
  for (int i = 0; i < 90; ++i) {
    const int ranks = static_cast<int>(random.between(1, 8));
    const ModelConfig config = random_config(random, ranks);
    for (const std::string_view scheme : schemes_with_work()) {
      const Case c{.problem = {.config = config,
                               .dtype = random.coin() ? DType::bf16 : DType::f32,
                               .seq = random.between(ranks, 40),
                               .batch = random.between(1, 3)},
                   .scheme = std::string(scheme),
                   .ranks = ranks};
      expect_one_truth(c);
      if (HasFailure()) return;
      ++cases;
    }
  }
  EXPECT_GE(cases, 400);
}

TEST(OneTruth, PeaksOfPublishedModels) {
  Random random(7);
  for (const char* model : {"deepseek-v3", "deepseek-v2-lite", "kimi-k2", "minicpm3"}) {
    const ModelConfig config = load_model_config(model);
    for (const int ranks : {2, 4, 8}) {
      if (config.num_attention_heads % ranks != 0) continue;
      for (const std::string_view scheme : schemes_with_work()) {
        const Case c{.problem = {.config = config,
                                 .dtype = random.coin() ? DType::bf16 : DType::f32,
                                 .seq = random.between(1000, 40000),
                                 .batch = random.between(1, 2)},
                     .scheme = std::string(scheme),
                     .ranks = ranks};
        expect_one_truth(c);
        const TokenShards tokens{c.problem.seq, c.problem.batch, ranks};
        const BlockRun run = dry_run(c);
        for (const RankMeasure& m : run.ranks) {
          EXPECT_EQ(standing_bytes(m), scheme_work(scheme, config, tokens, c.problem.dtype, m.rank).core_backward_bytes)
              << c.text();
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(OneTruth, EveryClosedFormBelongsToAScheme) {
  const auto& names = sequence_scheme_names();
  for (const std::string_view scheme : schemes_with_work()) {
    EXPECT_NE(std::find(names.begin(), names.end(), scheme), names.end()) << scheme;
  }
  EXPECT_THROW(scheme_work("ulysses", load_model_config("deepseek-v3"), {8, 1, 2}, DType::bf16, 0),
               std::invalid_argument);
}

}  // namespace
}  // namespace isomer
