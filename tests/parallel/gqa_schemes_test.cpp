// Every scheme of grouped-query attention against one rank in float64: outputs, all gradients, bytes and memory; over
// ranks, uneven shards, replicated KV heads, biases, cores and types.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cost/scheme_bytes.h"
#include "parallel/block_fixture.h"
#include "parallel/sequence/scheme.h"
#include "sharding/sequence_layout.h"

namespace isomer {
namespace {

using testing::compare_options;
using testing::seeded_data;
using testing::small_problem;

const auto kQuiet = [](const std::string&) {};

/// `biases`: on q, k and v ("qwen2"), or also on the output.
ModelConfig gqa_config(std::int64_t heads, std::int64_t kv_heads, const std::string& model_type, bool biases) {
  ModelConfig c;
  c.name = "small-gqa";
  c.model_type = model_type;
  c.attention = AttentionKind::gqa;
  c.hidden_size = 40;
  c.num_attention_heads = heads;
  c.num_key_value_heads = kv_heads;
  c.head_dim = 12;
  c.attention_bias = biases;
  c.rope.interleave = false;
  c.rms_norm_eps = 1e-5;
  c.num_hidden_layers = 1;
  c.vocab_size = 256;
  c.max_position_embeddings = 4096;
  return c;
}

struct Case {
  std::string layout;
  int ranks;
  std::int64_t heads, kv_heads;
  bool biases;
  AttentionCore core;
  DType dtype;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = fmt::format("{}_P{}_h{}_kv{}_{}_{}_{}", c.layout, c.ranks, c.heads, c.kv_heads,
                                 c.biases ? "biases" : "plain", name_of(c.core), name_of(c.dtype));
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return name;
}

struct Heads {
  int ranks;
  std::int64_t heads, kv_heads;
};

std::vector<Case> all_cases() {
  // Ranks that divide the KV heads, ranks that exceed them, and ranks that do neither: copies, several a rank.
  const std::vector<Heads> sizes = {{1, 6, 2}, {1, 5, 5}, {2, 8, 4}, {2, 6, 3}, {3, 6, 3},
                                    {3, 6, 2}, {4, 8, 2}, {4, 8, 1}, {8, 8, 4}, {8, 8, 8}};
  std::vector<Case> cases;
  for (const Heads& size : sizes) {
    for (const bool biases : {false, true}) {
      for (const AttentionCore core : {AttentionCore::eager, AttentionCore::fused}) {
        for (const DType dtype : {DType::f32, DType::bf16}) {
          cases.push_back({"explicit", size.ranks, size.heads, size.kv_heads, biases, core, dtype});
        }
      }
    }
  }
  const std::vector<Case> rounds = {
      {.layout = "ring", .ranks = 2, .heads = 6, .kv_heads = 2},
      {.layout = "ring", .ranks = 3, .heads = 5, .kv_heads = 5},
      {.layout = "ring", .ranks = 4, .heads = 3, .kv_heads = 1},  // more than the heads
      {.layout = "ring", .ranks = 8, .heads = 6, .kv_heads = 3},
      {.layout = "ring,recompute=attention", .ranks = 3, .heads = 6, .kv_heads = 2},
      {.layout = "ring,recompute=block", .ranks = 3, .heads = 6, .kv_heads = 2},
      {.layout = "explicit:2,ring:2", .ranks = 4, .heads = 8, .kv_heads = 2},
      {.layout = "explicit:2,ring:2", .ranks = 4, .heads = 6, .kv_heads = 3},
      {.layout = "explicit:4,ring:2", .ranks = 8, .heads = 4, .kv_heads = 2},
      {.layout = "explicit:2,ring:4,recompute=attention", .ranks = 8, .heads = 4, .kv_heads = 1}};
  for (Case c : rounds) {
    for (const bool biases : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        c.biases = biases;
        c.core = AttentionCore::fused;
        c.dtype = dtype;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

class GqaSchemes : public ::testing::TestWithParam<Case> {
 protected:
  /// Odd lengths where there are biases.
  BlockProblem problem() const {
    const Case& c = GetParam();
    const ModelConfig config = gqa_config(c.heads, c.kv_heads, c.ranks % 2 == 0 ? "qwen2" : "llama", c.biases);
    return small_problem(config, c.biases ? 29 : 24, c.dtype, c.core);
  }
};

TEST_P(GqaSchemes, AgreeWithOneRankAndWithTheirAccounts) {
  const Case& c = GetParam();
  const BlockProblem p = problem();
  const BlockData data = seeded_data(p);
  std::size_t num_weights = 0;
  data.weights.for_each([&](std::string_view, const Tensor&) { ++num_weights; });
  EXPECT_EQ(num_weights, 5u + (c.biases ? 3u + (p.config.model_type == "llama" ? 1u : 0u) : 0u));
  for (const MemoryPolicy policy : {MemoryPolicy::lean, MemoryPolicy::framework_eager}) {
    CompareOptions options = compare_options(p, c.ranks, c.layout);
    options.group.memory_policy = policy;
    const CompareReport report = compare_schemes(options, data, kQuiet);
    ASSERT_EQ(report.schemes.size(), 1u) << (report.omitted.empty() ? "" : report.omitted[0].reason);
    const SchemeReport& scheme = report.schemes[0];
    EXPECT_EQ(scheme.errors.size(), num_weights + 2);  // every gradient, y and dx
    for (const TensorError& e : scheme.errors) {
      EXPECT_TRUE(std::isfinite(e.max_abs)) << e.tensor;
      EXPECT_LE(e.max_abs, e.bound) << e.tensor;
      EXPECT_GT(e.max_reference, 0) << e.tensor;
      // The bound itself must be a tight one: in float32 rounding, not a wrong formula, sets it.
      EXPECT_LT(e.bound, (p.dtype == DType::f32 ? 1e-4 : 0.4) * e.max_reference) << e.tensor;
    }
    EXPECT_TRUE(scheme.bytes_agree) << scheme.bytes_sent << " sent, closed form " << scheme.bytes_predicted;
    EXPECT_TRUE(scheme.peak_agrees);
    EXPECT_EQ(c.ranks == 1, scheme.bytes_sent == 0);
    for (const RankMeasure& rank : scheme.run.ranks) {
      const Layout sized = sized_layout(parse_layout(c.layout), c.ranks);
      EXPECT_EQ(rank.bytes_gradient_sync, gradient_sync_bytes_sent(sized, p.config, rank.rank));
    }
  }
}

TEST_P(GqaSchemes, FailWithoutTheirCommunication) {
  const Case& c = GetParam();
  if (c.ranks == 1) GTEST_SKIP() << "one rank sends nothing";
  if (c.dtype == DType::bf16) GTEST_SKIP() << "covered in float32";
  const BlockProblem p = problem();
  const BlockData data = seeded_data(p);
  BlockRunOptions options;
  options.group = compare_options(p, c.ranks, c.layout).group;
  options.repetitions = 1;
  const Layout layout = parse_layout(c.layout);
  const BlockRun intact = run_block(p, data, layout, options);
  options.poison_memory = true;
  const BlockRun poisoned = run_block(p, data, layout, options);
  options.drop_transfers = true;
  const BlockRun broken = run_block(p, data, layout, options);
  EXPECT_EQ(std::memcmp(intact.y.raw(), poisoned.y.raw(), static_cast<std::size_t>(intact.y.nbytes())), 0);
  EXPECT_EQ(std::memcmp(intact.dx.raw(), poisoned.dx.raw(), static_cast<std::size_t>(intact.dx.nbytes())), 0);
  const auto* a = intact.y.data<float>();
  const auto* b = broken.y.data<float>();
  double difference = 0;
  for (std::int64_t i = 0; i < intact.y.numel(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    difference = std::isnan(d) ? INFINITY : std::max(difference, d);
  }
  EXPECT_GT(difference, 0.1);
}

INSTANTIATE_TEST_SUITE_P(Grid, GqaSchemes, ::testing::ValuesIn(all_cases()), case_name);

// (P−1)/P·t·(2h + 2n_kv')·head_dim·e each way, n_kv' the KV heads with their copies, written out.
TEST(GqaBytes, CopiesOfKvHeadsTravel) {
  const auto sent = [](int ranks, std::int64_t heads, std::int64_t kv_heads) {
    const ModelConfig config = gqa_config(heads, kv_heads, "llama", false);
    const Layout layout = sized_layout(parse_layout("explicit"), ranks);
    return scheme_bytes_sent({.layout = layout, .config = config, .seq = 96, .activations = DType::bf16}, 0);
  };
  EXPECT_EQ(sent(2, 8, 4).forward, 48 / 2 * (2 * 8 + 2 * 4) * 12 * 2);
  EXPECT_EQ(sent(8, 8, 4).forward, 12 * 7 / 8.0 * (2 * 8 + 2 * 8) * 12 * 2);
  EXPECT_EQ(sent(8, 8, 1).backward, 12 * 7 / 8.0 * (2 * 8 + 2 * 8) * 12 * 2);
  EXPECT_EQ(sent(2, 6, 3).backward, 48 / 2 * (2 * 6 + 2 * 6) * 12 * 2);
}

// (P−1)·t·W_kv·e, and (e + 4) in the backward, W_kv = 2·n_kv·head_dim; with inner ranks a share of the copies.
TEST(GqaBytes, KvHeadsPassRound) {
  const ModelConfig config = gqa_config(8, 2, "llama", false);
  const auto sent = [&](const char* text) {
    const Layout layout = parse_layout(text);
    return scheme_bytes_sent({.layout = layout, .config = config, .seq = 96, .activations = DType::bf16}, 0);
  };
  EXPECT_EQ(sent("ring:4").forward, 3 * 24 * (2 * 2 * 12) * 2);
  EXPECT_EQ(sent("ring:4").backward, 3 * 24 * (2 * 2 * 12) * (2 + 4));
  const std::int64_t heads = 24 / 2 * (2 * 8 + 2 * 2) * 12 * 2, round = 48 * (2 * 2 / 2 * 12);
  EXPECT_EQ(sent("explicit:2,ring:2").forward, heads + round * 2);
  EXPECT_EQ(sent("explicit:2,ring:2").backward, heads + round * (2 + 4));
}

TEST(KvHeads, EveryRankHasThoseOfItsQueryHeads) {
  for (std::int64_t kv_heads : {1, 2, 3, 4, 6, 8, 12}) {
    for (const int ranks : {1, 2, 3, 4, 6, 8, 12, 24}) {
      const std::int64_t heads = 24;  // all of the above divide it
      const KvHeadShards shards{kv_heads, ranks};
      ASSERT_EQ(heads % shards.with_copies(), 0);
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t rank = head / (heads / ranks), in_rank = head % (heads / ranks);
        const std::int64_t copy = rank * shards.per_rank() + in_rank * shards.per_rank() / (heads / ranks);
        EXPECT_EQ(copy / shards.copies(), head * kv_heads / heads) << kv_heads << " " << ranks << " " << head;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(shards.kv_head(rank), rank * (heads / ranks) * kv_heads / heads);
      }
    }
  }
}

TEST(GqaUnfit, SchemesOfTheOtherAttentionSaySo) {
  const ModelConfig config = gqa_config(6, 3, "llama", false);
  EXPECT_NE(why_unfit(parse_layout("laga"), config, 3, 24).find("latent attention"), std::string::npos);
  EXPECT_THROW(make_sequence_scheme(parse_layout("laga"), config), std::invalid_argument);
  EXPECT_NE(why_unfit(parse_layout("explicit"), config, 4, 24).find("1, 2, 3, 6"), std::string::npos);
  EXPECT_NE(why_unfit(parse_layout("explicit"), config, 4, 24).find("explicit:2,ring:2, ring:4"), std::string::npos);
  EXPECT_TRUE(why_unfit(parse_layout("explicit"), config, 6, 24).empty());
  EXPECT_TRUE(why_unfit(parse_layout("ring"), config, 24, 24).empty());
  EXPECT_THROW(make_sequence_scheme(parse_layout("ring:2,recompute=up-projection"), config), std::invalid_argument);
  EXPECT_THROW(make_sequence_scheme(parse_layout("explicit:2,latent-ring:2"), config), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
