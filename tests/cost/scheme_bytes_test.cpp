// Closed forms of bytes and of saved tensors: against the figures in docs/communication.md, against formulas for even
// shards written out again here, and against the ledger of dry runs over random blocks.
#include "cost/scheme_bytes.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "cost/op_cost.h"
#include "full_tests.h"
#include "sharding/sequence_layout.h"
#include "study/block_run.h"

namespace isomer {
namespace {

const std::vector<std::string> kSchemes = {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product",
                                           "laga"};

TEST(CausalPairs, AreThoseOfBruteForce) {
  const auto property = [] {
    const auto position = rc::gen::inRange<std::int64_t>(0, 40);
    const auto length = rc::gen::inRange<std::int64_t>(0, 40);
    const std::int64_t queries_from = *position, queries = *length, keys_from = *position, keys = *length;
    std::int64_t pairs = 0;
    for (std::int64_t q = 0; q < queries; ++q) {
      for (std::int64_t k = 0; k < keys; ++k) pairs += keys_from + k <= queries_from + q ? 1 : 0;
    }
    RC_ASSERT(causal_pairs(queries_from, queries, keys_from, keys) == pairs);
  };
  EXPECT_TRUE(rc::check("causal_pairs", property));
  EXPECT_EQ(causal_pairs(0, 1 << 20, 0, 1 << 20), (std::int64_t{1} << 19) * ((1 << 20) + 1));
}

TEST(OpCost, CountsAMultiplyAddAsTwo) {
  const OpCost product = matmul_cost(3, 5, 7, 11, DType::bf16, DType::f32);
  EXPECT_EQ(product.flops, 2 * 3 * 5 * 7 * 11);
  EXPECT_EQ(product.bytes_read, 3 * (5 * 11 + 11 * 7) * 2);
  EXPECT_EQ(product.bytes_written, 3 * 5 * 7 * 4);
  EXPECT_EQ(attention_forward_cost(4, 10, 192, 128, 0).flops, 2 * 4 * 10 * (192 + 128));
  EXPECT_EQ(attention_backward_cost(4, 10, 192, 128, 0).flops, 2 * 4 * 10 * (3 * 192 + 2 * 128));
}

SchemeBytes sent(const std::string& scheme, const std::string& model, std::int64_t seq, int ranks) {
  const Layout layout = sized_layout(parse_layout(scheme), ranks);
  return scheme_bytes_sent({layout, load_model_config(model), seq, 1, DType::bf16}, 0);
}

TEST(SchemeBytes, AreThePublishedFiguresOfDeepSeekV3) {
  // S = 16384, P = 8, bfloat16: t = 2048, h = 128, n + r = 192, v = 128, d + r = 576.
  const auto megabytes = [](std::int64_t bytes) { return std::round(static_cast<double>(bytes) / 1e5) / 10; };
  EXPECT_EQ(megabytes(sent("explicit", "deepseek-v3", 16384, 8).forward), 293.6);
  EXPECT_EQ(megabytes(sent("laga", "deepseek-v3", 16384, 8).forward), 163.3);
  EXPECT_EQ(megabytes(sent("explicit-shared-rope", "deepseek-v3", 16384, 8).forward), 266.1);
  EXPECT_EQ(megabytes(sent("explicit", "deepseek-v3", 16384, 8).backward), 293.6);
  EXPECT_EQ(megabytes(sent("laga", "deepseek-v3", 16384, 8).backward), 179.8);  // the latent's gradient is float32
  EXPECT_EQ(sent("absorbed", "deepseek-v3", 16384, 8).total(), sent("laga", "deepseek-v3", 16384, 8).total());
}

TEST(SchemeBytes, CrossWhereTheClosedFormsSay) {
  // LAGA is ahead of explicit in the forward while P < h(n+r+v)/(d+r): 71.1 for V3, 8.9 for V2-Lite.
  const auto ahead = [](const std::string& a, const std::string& b, const std::string& model, int ranks) {
    return sent(a, model, 16384, ranks).forward < sent(b, model, 16384, ranks).forward;
  };
  EXPECT_TRUE(ahead("laga", "explicit", "deepseek-v3", 64));
  EXPECT_FALSE(ahead("laga", "explicit", "deepseek-v3", 128));
  EXPECT_TRUE(ahead("laga", "explicit", "deepseek-v2-lite", 8));
  EXPECT_FALSE(ahead("laga", "explicit", "deepseek-v2-lite", 16));
  // explicit-shared-rope: P < h(n+v)/d = 64, 8, where both are equal.
  EXPECT_TRUE(ahead("laga", "explicit-shared-rope", "deepseek-v3", 32));
  EXPECT_EQ(sent("laga", "deepseek-v3", 16384, 64).forward,
            sent("explicit-shared-rope", "deepseek-v3", 16384, 64).forward);
  EXPECT_EQ(sent("laga", "deepseek-v2-lite", 16384, 8).forward,
            sent("explicit-shared-rope", "deepseek-v2-lite", 16384, 8).forward);
}

TEST(SchemeBytes, KnowNoSchemeWithoutAClosedForm) {
  EXPECT_THROW(sent("lago", "deepseek-v3", 16384, 8), std::invalid_argument);
}

struct RandomBlock {
  BlockProblem problem;
  std::string scheme;
  int ranks = 1;
};

RandomBlock random_block() {
  RandomBlock block;
  ModelConfig& c = block.problem.config;
  block.scheme = *rc::gen::elementOf(kSchemes);
  block.ranks = *rc::gen::inRange(1, 9);
  c.num_attention_heads = c.num_key_value_heads = block.ranks * *rc::gen::inRange(1, 5);
  c.name = "random";
  c.hidden_size = *rc::gen::inRange(1, 40);
  c.q_lora_rank = *rc::gen::element(0, 1, 7, 24);
  c.kv_lora_rank = *rc::gen::inRange(1, 40);
  c.qk_nope_head_dim = *rc::gen::inRange(1, 20);
  c.qk_rope_head_dim = 2 * *rc::gen::inRange(0, 8);
  c.v_head_dim = *rc::gen::inRange(1, 20);
  c.kv_a_layernorm = *rc::gen::arbitrary<bool>();
  c.attention_bias = *rc::gen::arbitrary<bool>();
  block.problem.dtype = *rc::gen::element(DType::f32, DType::bf16);
  block.problem.seq = *rc::gen::inRange(block.ranks, 70);
  block.problem.batch = *rc::gen::inRange(1, 4);
  block.problem.core = *rc::gen::element(AttentionCore::eager, AttentionCore::fused);
  return block;
}

/// One of the layouts that merge parts, some of them recomputed; ranks may exceed heads.
RandomBlock random_parts() {
  RandomBlock block = random_block();
  const int inner = *rc::gen::inRange(1, 4), outer = *rc::gen::inRange(1, 5);
  const bool alone = *rc::gen::arbitrary<bool>();
  block.scheme =
      alone ? fmt::format("{}:{}", *rc::gen::element("ring", "latent-gather", "latent-ring"), outer)
            : fmt::format(
                  fmt::runtime(*rc::gen::element("explicit:{},ring:{}", "laga:{},ring:{}", "laga:{},latent-ring:{}")),
                  inner, outer);
  block.scheme += *rc::gen::element("", "", ",recompute=attention", ",recompute=block");
  block.ranks = alone ? outer : inner * outer;
  ModelConfig& c = block.problem.config;
  c.num_attention_heads = c.num_key_value_heads = (alone ? 1 : inner) * *rc::gen::inRange(1, 5);
  block.problem.seq = *rc::gen::inRange(block.ranks, 90);
  block.problem.core = AttentionCore::fused;
  return block;
}

BlockRun dry_run(const RandomBlock& block) {
  const BlockProblem& p = block.problem;
  const Shape rows{p.seq * p.batch, p.config.hidden_size};
  const BlockData data{.weights = seeded_attention_weights(p.config, 1, p.dtype, true),
                       .x = Tensor::unrecorded("x", p.dtype, rows, true),
                       .dy = Tensor::unrecorded("dy", p.dtype, rows, true)};
  BlockRunOptions options;
  options.group.num_ranks = block.ranks;
  options.group.threads_per_rank = 1;
  options.group.dry_run = true;
  return run_block(p, data, parse_layout(block.scheme), options);
}

void ledger_property(const RandomBlock& block) {
  const BlockProblem& p = block.problem;
  const Layout layout = sized_layout(parse_layout(block.scheme), block.ranks);
  const SchemeCase scheme{layout, p.config, p.seq, p.batch, p.dtype};
  const BlockRun run = dry_run(block);
  RC_ASSERT(run.ranks.size() == static_cast<std::size_t>(block.ranks));
  std::int64_t sent_in_all = 0, received_in_all = 0;
  for (const RankMeasure& m : run.ranks) {
    const SchemeBytes out = scheme_bytes_sent(scheme, m.rank);
    const SchemeBytes in = scheme_bytes_received(scheme, m.rank);
    RC_ASSERT(m.bytes_forward == out.forward);
    RC_ASSERT(m.bytes_backward == out.backward);
    RC_ASSERT(m.bytes_received_forward == in.forward);
    RC_ASSERT(m.bytes_received_backward == in.backward);
    RC_ASSERT(m.bytes_gradient_sync == gradient_sync_bytes_sent(layout, p.config, m.rank));
    sent_in_all += out.total();
    received_in_all += in.total();
  }
  RC_ASSERT(sent_in_all == received_in_all);
}

TEST(SchemeBytes, AreTheLedgersOverRandomBlocks) {
  for (int hundred = 0; hundred < (testing::full_tests() ? 40 : 4); ++hundred) {
    ASSERT_TRUE(
        rc::check("by heads: closed forms and ledger agree on every rank", [] { ledger_property(random_block()); }));
    ASSERT_TRUE(
        rc::check("by parts: closed forms and ledger agree on every rank", [] { ledger_property(random_parts()); }));
  }
}

/// The table for even shards, as docs/communication.md has it.
SchemeBytes even_shards(const std::string& scheme, const ModelConfig& c, std::int64_t t, std::int64_t P,
                        std::int64_t e) {
  const std::int64_t h = c.num_attention_heads, n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim;
  const auto exchanged = [&](std::int64_t width) { return (P - 1) * t * h / P * width; };
  if (scheme == "explicit") return {exchanged(2 * (n + r) + 2 * v) * e, exchanged(2 * (n + r) + 2 * v) * e};
  if (scheme == "explicit-shared-rope") {
    const std::int64_t heads = exchanged((n + r) + n + 2 * v) * e;
    return {heads + (P - 1) * t * r * e, heads + (P - 1) * t * r * 4};
  }
  const std::int64_t heads = exchanged((n + r) + v) * e, latent = (P - 1) * t * (c.kv_lora_rank + r);
  return {heads + latent * e, heads + latent * 4};
}

TEST(SchemeBytes, AreTheTableForEvenShards) {
  const auto property = [] {
    RandomBlock block = random_block();
    const std::int64_t t = *rc::gen::inRange(1, 50);
    block.problem.seq = t * block.ranks;
    const Layout layout = sized_layout(parse_layout(block.scheme), block.ranks);
    const SchemeCase scheme{layout, block.problem.config, block.problem.seq, 1, block.problem.dtype};
    const auto expected = even_shards(block.scheme, block.problem.config, t, block.ranks, size_of(block.problem.dtype));
    for (int rank = 0; rank < block.ranks; ++rank) {
      const auto actual = scheme_bytes_sent(scheme, rank);
      RC_ASSERT(actual.forward == expected.forward);
      RC_ASSERT(actual.backward == expected.backward);
    }
  };
  EXPECT_TRUE(rc::check("closed forms for even shards", property));
}

/// Elements that a scheme saves per local token: bfloat16 tensors, and float32 ones (lse).
struct SavedElements {
  std::int64_t activations = 0, statistics = 0;
  std::int64_t total() const { return activations + statistics; }
};

class SavedForTheBackward : public ::testing::Test {
 protected:
  static constexpr std::int64_t P = 8;
  const ModelConfig c = load_model_config("deepseek-v3");
  const std::int64_t h = c.num_attention_heads, n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim,
                     d = c.kv_lora_rank;

  std::int64_t saved_bytes(const std::string& layout, std::int64_t seq, AttentionCore core) const {
    RandomBlock block;
    block.scheme = layout;
    block.ranks = P;
    block.problem.config = c;
    block.problem.dtype = DType::bf16;
    block.problem.seq = seq;
    block.problem.core = core;
    return dry_run(block).ranks.at(3).saved_bytes;
  }

  /// What every scheme keeps: x, c_q, ĉ_q and c in bfloat16, three norms' scalars in float32.
  std::int64_t common_bytes() const { return 2 * (c.hidden_size + 2 * c.q_lora_rank + d) + 4 * 3; }

  void expect_fused(const std::string& layout, const SavedElements& elements) const {
    for (const std::int64_t seq : {4096, 16384}) {
      const std::int64_t per_token = common_bytes() + 2 * elements.activations + 4 * elements.statistics;
      EXPECT_EQ(saved_bytes(layout, seq, AttentionCore::fused), seq / P * per_token) << layout << " at " << seq;
    }
  }
};

TEST_F(SavedForTheBackward, ExplicitAndSharedRope) {
  // The table leaves the local latent out (d of it is common to all); the engine's row holds the rope key beside it.
  const SavedElements table{h * (2 * (n + r) + 3 * v), h};
  EXPECT_EQ(table.total(), 98432);
  const SavedElements engine{table.activations + (d + r), table.statistics};
  expect_fused("explicit", engine);
  expect_fused("explicit-shared-rope", engine);
}

TEST_F(SavedForTheBackward, Laga) {
  const SavedElements explicit_table{h * (2 * (n + r) + 3 * v), h};
  const SavedElements copied{explicit_table.activations + P * d, h}, viewed{copied.activations + h * n, h};
  EXPECT_EQ(copied.total(), 102528);
  EXPECT_EQ(viewed.total(), 118912);
  // The gathered latent has its r columns, and the local one is not kept beside it.
  expect_fused("laga", {copied.activations + P * r, h});
  expect_fused("laga:v=view", {viewed.activations + P * r, h});
}

TEST_F(SavedForTheBackward, Absorbed) {
  const SavedElements concatenated{h * ((n + r) + (d + r) + d + v) + P * (d + r), h};
  const SavedElements apart{h * ((n + r) + 2 * d + v) + P * (d + r), h};
  EXPECT_EQ(concatenated.total(), 184960);
  EXPECT_EQ(apart.total(), 176768);
  expect_fused("absorbed", concatenated);
  expect_fused("absorbed-two-product", apart);
}

TEST_F(SavedForTheBackward, LagaThatKeepsLess) {
  const SavedElements strided{h * ((n + r) + (n + v) + 2 * v) + P * (d + r), h};
  const SavedElements rebuilt{h * ((n + r) + 2 * v) + P * (d + r), h};
  EXPECT_EQ(strided.total(), 94848);
  EXPECT_EQ(rebuilt.total(), 62080);
  expect_fused("laga:kv=strided", strided);
  expect_fused("laga:kv=rebuild", rebuilt);
  expect_fused("laga:recompute=up-projection", rebuilt);
}

TEST_F(SavedForTheBackward, WhereTokensKeepAllHeads) {
  const SavedElements streamed{h * ((n + r) + v) + P * (d + r), h}, latent_ring{h * ((n + r) + v) + (d + r), h};
  const SavedElements ring{h * (2 * (n + r) + 2 * v), h};
  EXPECT_EQ(streamed.total(), 45696);
  EXPECT_EQ(latent_ring.total(), 41664);
  EXPECT_EQ(ring.total(), 82048);
  expect_fused("latent-gather", streamed);
  expect_fused("latent-ring", latent_ring);
  // The table leaves the rank's own latent out of ring (d of it is common to all), from which dW_kv_b comes.
  expect_fused("ring", {ring.activations + (d + r), h});
  expect_fused("ring:recompute=up-projection", latent_ring);
  // Kept: the up-projection's output itself, not K with its rope columns on every head.
  expect_fused("latent-gather:kv=kept", {streamed.activations + P * h * (n + v), h});
}

TEST_F(SavedForTheBackward, Recomputed) {
  const SavedElements laga{h * (2 * (n + r) + 2 * v) + P * (d + r), 0};
  expect_fused("laga:recompute=attention", laga);  // no core output, no lse
  expect_fused("latent-ring:recompute=attention", {h * (n + r) + (d + r), 0});
  expect_fused("latent-gather:recompute=attention", {h * (n + r) + P * (d + r), 0});
  expect_fused("ring:recompute=attention", {h * (2 * (n + r) + v) + (d + r), 0});
  for (const std::string layout : {"laga:recompute=block", "ring:recompute=block", "latent-gather:recompute=block"}) {
    EXPECT_EQ(saved_bytes(layout, 4096, AttentionCore::fused), 4096 / P * 2 * c.hidden_size) << layout;
  }
}

TEST_F(SavedForTheBackward, AnEagerCoreKeepsItsProbabilitiesInstead) {
  // No lse, and the core's output goes once it has travelled; h/P score matrices of S² stay. Absorbed needs its latent
  // output for W_UV's gradient.
  constexpr std::int64_t S = 2048;
  const std::int64_t probabilities = 2 * h / P * S * S;
  const auto bytes = [&](std::int64_t elements) { return S / P * (common_bytes() + 2 * elements) + probabilities; };
  EXPECT_EQ(saved_bytes("explicit", S, AttentionCore::eager), bytes(h * (2 * (n + r) + 2 * v) + (d + r)));
  EXPECT_EQ(saved_bytes("laga", S, AttentionCore::eager), bytes(h * (2 * (n + r) + 2 * v) + P * (d + r)));
  EXPECT_EQ(saved_bytes("absorbed", S, AttentionCore::eager), bytes(h * ((n + r) + (d + r) + d + v) + P * (d + r)));
}

}  // namespace
}  // namespace isomer
