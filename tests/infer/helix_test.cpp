// Helix and its baseline medha against one rank: logits and greedy tokens over the grid of layouts, at every length,
// with a planted token at every depth; the exchange's bytes; its overlap.
#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <numeric>

#include "engine_fixture.h"
#include "full_tests.h"
#include "infer/generate.h"
#include "infer/seeded_cache.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::HasSubstr;

/// 16 query heads, so that 16 ranks have one each; two layers, of which the second may be a mixture of 24 experts.
ModelConfig config_of(bool latent, bool moe) {
  ModelConfig c = latent ? latent_config() : grouped_config();
  c.num_attention_heads = 16;
  if (latent) c.num_key_value_heads = 16;
  c.num_hidden_layers = 2;
  c.moe = latent_config().moe;
  c.moe.n_routed_experts = 24;
  if (!moe) c.moe = {};
  return c;
}

/// 9 query heads in 3 groups, as SmolLM2.
ModelConfig nine_heads() {
  ModelConfig c = grouped_config();
  c.num_attention_heads = 9;
  c.num_key_value_heads = 3;
  c.num_hidden_layers = 2;
  return c;
}

struct Decoded {
  std::vector<std::vector<std::int32_t>> tokens;  // a sequence
  std::vector<std::vector<double>> logits;        // a step, of all sequences
};

/// Prompts of different lengths, then `steps` greedy steps of all sequences together; all ranks must agree.
Decoded greedy(const std::string& layout, const ModelConfig& config, const ModelWeights& weights, int batch,
               int steps) {
  Decoded decoded;
  decoded.tokens.resize(static_cast<std::size_t>(batch));
  with_engine({.layout = layout, .prefill_chunk = 23}, config, weights, 16 * 1024,
              [&](RankContext& ctx, Engine& engine) {
                std::vector<Ids> last;
                std::vector<int> sequences;
                const auto choose = [&](const std::vector<double>& logits) {
                  const auto first = logits.begin();
                  return static_cast<std::int32_t>(std::max_element(first, logits.end()) - first);
                };
                for (int b = 0; b < batch; ++b) {
                  const Ids prompt = some_ids(1 + 19 * b, 40 + static_cast<std::uint64_t>(b));
                  sequences.push_back(engine.add_sequence());
                  last.push_back({choose(values_of(engine.prefill(ctx, sequences.back(), prompt)))});
                }
                for (int step = 0; step < steps; ++step) {
                  std::vector<Engine::Input> inputs;
                  for (std::size_t b = 0; b < sequences.size(); ++b) inputs.push_back({sequences[b], last[b]});
                  const auto logits = values_of(engine.decode(ctx, inputs));
                  if (ctx.rank() == 0) decoded.logits.push_back(logits);
                  for (std::size_t b = 0; b < sequences.size(); ++b) {
                    if (ctx.rank() == 0) decoded.tokens[b].push_back(last[b][0]);
                    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(b) * config.vocab_size;
                    last[b] = {choose({row, row + config.vocab_size})};
                  }
                }
              });
  return decoded;
}

void expect_same(const Decoded& got, const Decoded& expected, const std::string& what) {
  EXPECT_EQ(got.tokens, expected.tokens) << what;
  ASSERT_EQ(got.logits.size(), expected.logits.size()) << what;
  double largest = 0;
  for (std::size_t i = 0; i < got.logits.size(); ++i) {
    largest = std::max(largest, max_relative_difference(got.logits[i], expected.logits[i]));
  }
  // Some hundred float64 roundings a block: a wrong key, head or slice shows ten orders above.
  EXPECT_LT(largest, 1e-10) << what;
}

/// One choice of every factor, by its index.
using Choice = std::vector<int>;

/// Every choice, or as few as have every pair of two factors' values (greedily).
std::vector<Choice> choices(const std::vector<int>& sizes, bool all) {
  std::vector<Choice> grid = {{}};
  for (const int size : sizes) {
    std::vector<Choice> longer;
    for (const Choice& begun : grid) {
      for (int value = 0; value < size; ++value) {
        longer.push_back(begun);
        longer.back().push_back(value);
      }
    }
    grid = longer;
  }
  if (all) return grid;
  std::set<std::array<int, 4>> covered;
  const auto pairs_of = [](const Choice& c) {
    std::vector<std::array<int, 4>> pairs;
    for (int i = 0; i < static_cast<int>(c.size()); ++i) {
      for (int j = 0; j < i; ++j)
        pairs.push_back({i, c[static_cast<std::size_t>(i)], j, c[static_cast<std::size_t>(j)]});
    }
    return pairs;
  };
  std::vector<Choice> taken;
  while (true) {
    std::size_t most = 0;
    const Choice* best = nullptr;
    for (const Choice& c : grid) {
      std::size_t news = 0;
      for (const auto& pair : pairs_of(c)) news += covered.contains(pair) ? 0 : 1;
      if (news > most) {
        most = news;
        best = &c;
      }
    }
    if (best == nullptr) return taken;
    taken.push_back(*best);
    for (const auto& pair : pairs_of(*best)) covered.insert(pair);
  }
}

std::string layout_of(const Choice& c) {
  constexpr int kKvp[] = {1, 2, 3, 4, 8};
  const int kvp = kKvp[c[0]], tpa = 1 + c[1], ranks = kvp * tpa;
  const bool moe = c[4] == 1;
  const int ep = !moe || c[2] == 0 ? 1 : (c[2] == 1 ? std::gcd(ranks, 2) : std::gcd(ranks, 24));
  std::string layout = fmt::format("helix:kvp={},tpa={},tpf={},ep={}", kvp, tpa, ranks / ep, ep);
  if (c[6] > 0) layout += ",q=gather";
  const bool latent = c[3] == 0;
  if (c[6] > 1 && latent) layout += ",absorb=before";
  if (c[7] == 1 && latent) layout += ",wuv=before";
  if (c[8] == 1) layout += ",experts=gather";
  if (c[9] == 1) layout += ",hopb=off";
  return layout;
}

TEST(Helix, DecodesWhatOneRankDoes) {
  constexpr int kBatch[] = {1, 3, 8};
  std::map<std::array<int, 4>, Decoded> one_rank;
  // kvp, tpa, expert groups, attention, FFN, batch; queries, W_UV, joining experts, overlap.
  std::vector<Choice> grid = choices({5, 2, 3, 2, 2, 3, 3, 2, 2, 2}, false);
  if (full_tests()) {
    grid = choices({5, 2, 3, 2, 2, 3}, true);
    for (int i = 0; i < static_cast<int>(grid.size()); ++i) {
      for (const int value : {i % 3, i % 2, i / 2 % 2, i / 4 % 2}) grid[static_cast<std::size_t>(i)].push_back(value);
    }
  }
  for (const Choice& c : grid) {
    const ModelConfig config = config_of(c[3] == 0, c[4] == 1);
    const ModelWeights weights = noisy_weights(config, DType::f64);
    // Many ranks on few cores wait for each other; whole texts with few of them.
    const int batch = kBatch[c[5]], num_ranks = parse_decode_layout(layout_of(c), config).devices();
    const int steps = full_tests() || (batch == 1 && num_ranks <= 3) ? 256 : (num_ranks <= 4 ? 24 : 8);
    auto& expected = one_rank[{c[3], c[4], batch, steps}];
    if (expected.tokens.empty()) expected = greedy("tp:1", config, weights, batch, steps);
    const std::string what = fmt::format("{} {} batch {}", layout_of(c), config.name, batch);
    expect_same(greedy(layout_of(c), config, weights, batch, steps), expected, what);
  }
}

TEST(Helix, SplitsUnevenHeadsByKvGroup) {
  const ModelConfig config = nine_heads();
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const Decoded expected = greedy("tp:1", config, weights, 3, 12);
  for (const char* layout : {"helix:kvp=2,tpa=2", "helix:kvp=4,tpa=1,q=gather", "helix:kvp=3,tpa=2,q=gather",
                             "helix:kvp=1,tpa=4", "helix:kvp=1,tpa=6", "medha:kvp=2,tpa=2"}) {
    expect_same(greedy(layout, config, weights, 3, 12), expected, layout);
  }
  const HeadCut first = column_heads_of(config, 2, 0), second = column_heads_of(config, 2, 1);
  EXPECT_EQ(first.query.count, 6);
  EXPECT_EQ(first.kv.count, 2);
  EXPECT_EQ(second.query.begin, 6);
  EXPECT_EQ(second.query.count, 3);
  const auto note = [&](const char* layout) { return cache_copies_note(parse_decode_layout(layout, config), config); };
  EXPECT_EQ(note("helix:kvp=2,tpa=3"), "");
  EXPECT_THAT(note("helix:kvp=2,tpa=6"), HasSubstr("the cache stands 2 times: tpa of 6 ranks"));
  EXPECT_THAT(note("helix:kvp=1,tpa=4"), HasSubstr("the cache stands 1.33 times: tpa of 4 ranks"));
}

/// Every query head falls to one column, with the KV head that it uses, in equal groups.
TEST(GroupedHeads, CoverEveryHeadOnceWithItsKvHead) {
  EXPECT_TRUE(rc::check("grouped_heads", [] {
    const auto kv = *rc::gen::inRange<std::int64_t>(1, 12), group = *rc::gen::inRange<std::int64_t>(1, 9);
    const auto parts = *rc::gen::inRange<std::int64_t>(1, kv * group + 1);
    std::int64_t next = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      const HeadCut cut = grouped_heads(kv * group, kv, parts, part);
      RC_ASSERT(cut.query.begin == next && cut.query.count > 0 && cut.kv.count > 0);
      RC_ASSERT(cut.query.count % cut.kv.count == 0);
      for (std::int64_t i = 0; i < cut.query.count; ++i) {
        RC_ASSERT((cut.query.begin + i) / group == cut.kv.begin + i * cut.kv.count / cut.query.count);
      }
      next = cut.query.end();
    }
    RC_ASSERT(next == kv * group);
  }));
}

/// Logits of position after position, decoded one, or a few, at once after a prompt.
TEST(Helix, HoldsAtEveryLengthAndChunk) {
  constexpr std::int64_t kLengths = 600;
  const Ids ids = some_ids(kLengths);
  for (const bool latent : {true, false}) {
    const ModelConfig config = config_of(latent, false);
    const ModelWeights weights = noisy_weights(config, DType::f64);
    const auto expected = engine_logits({.prompt = kLengths}, config, weights, ids);
    const std::uint64_t runs = full_tests() ? 20 : 1;
    for (std::uint64_t run = 0; run < runs; ++run) {
      const auto random = [&](std::uint64_t what, int from, int to) {
        return from + static_cast<int>((noise(run + (latent ? 90 : 50), what) / 3.4642 + 0.5) * (to - from));
      };
      const std::string layout =
          fmt::format("helix:kvp={},tpa={},chunk={}", random(1, 2, 5), run % 2 + 1, random(2, 1, 40));
      const EngineRun decode{.layout = layout, .prompt = random(3, 0, 60), .prefill_chunk = random(4, 1, 50)};
      EXPECT_LT(max_relative_difference(engine_logits(decode, config, weights, ids), expected), 1e-10) << layout;
    }
  }
}

/// A row that takes nearly all of the attention, planted at every depth of a seeded cache.
TEST(Helix, FindsAPlantedTokenAtEveryDepth) {
  const std::int64_t kDepths = full_tests() ? 600 : 70;
  for (const bool latent : {true, false}) {
    const ModelConfig config = config_of(latent, false);
    const ModelWeights weights = noisy_weights(config, DType::f64);
    const auto logits_of = [&](const std::string& layout) {
      std::vector<std::vector<double>> logits;
      with_engine({.layout = layout}, config, weights, 1024, [&](RankContext& ctx, Engine& engine) {
        const int sequence = engine.add_sequence();
        append_seeded_rows(ctx, engine, {&sequence, 1}, kDepths, 5);
        const Ids id = {17};
        const Engine::Input input{sequence, id};
        for (std::int64_t depth = 0; depth < kDepths; ++depth) {
          for (const double factor : {30.0, 1 / 30.0}) {
            for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
              for (const TokenRun& run : engine.cache().runs(sequence, depth, depth + 1)) {
                const Tensor row = engine.cache().keys(layer).slice(0, run.row, 1);
                scaled_sum(ctx, "plant", row, Tensor(), factor, row);
              }
            }
            if (factor < 1) continue;
            const auto values = values_of(engine.decode(ctx, {&input, 1}));
            if (ctx.rank() == 0) logits.push_back(values);
            engine.truncate(ctx, sequence, kDepths);
          }
        }
      });
      return logits;
    };
    const auto expected = logits_of("tp:1");
    const char* two_columns = latent ? "helix:kvp=2,tpa=2,wuv=before" : "helix:kvp=2,tpa=2";
    for (const char* layout : {"helix:kvp=3,tpa=1", two_columns, "medha:kvp=2,tpa=2"}) {
      const auto got = logits_of(layout);
      for (std::size_t depth = 0; depth < got.size(); ++depth) {
        EXPECT_LT(max_relative_difference(got[depth], expected[depth]), 1e-10) << layout << " depth " << depth;
      }
    }
    // The plant is seen: depths differ.
    EXPECT_GT(max_relative_difference(expected[0], expected[50]), 1e-2);
  }
}

/// Sequences that end and are replaced while others go on.
TEST(Helix, ReplacesSequences) {
  const ModelConfig config = config_of(true, true);
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const auto logits_of = [&](const std::string& layout) {
    std::vector<std::vector<double>> logits;
    with_engine({.layout = layout}, config, weights, 2048, [&](RankContext& ctx, Engine& engine) {
      std::vector<int> sequences;
      const Ids ids = some_ids(400);
      for (std::uint64_t step = 0; step < 30; ++step) {
        if (step % 7 == 0 || sequences.size() < 2) {
          if (sequences.size() == 3) {
            engine.remove_sequence(ctx, sequences[step % 3]);
            sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(step % 3));
          }
          sequences.push_back(engine.add_sequence());
          engine.prefill(ctx, sequences.back(), some_ids(static_cast<std::int64_t>(1 + step), step));
        }
        std::vector<Engine::Input> inputs;
        for (std::size_t i = 0; i < sequences.size(); ++i)
          inputs.push_back({sequences[i], std::span(ids).subspan(step + i, 1)});
        const auto values = values_of(engine.decode(ctx, inputs));
        if (ctx.rank() == 0) logits.push_back(values);
      }
    });
    return logits;
  };
  const auto expected = logits_of("tp:1"), got = logits_of("helix:kvp=3,tpa=1");
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_LT(max_relative_difference(got[step], expected[step]), 1e-10) << step;
  }
}

/// Overlap changes when messages travel, not what they say.
TEST(Helix, OverlapChangesNoBit) {
  const ModelConfig config = config_of(true, true);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const ModelWeights weights = noisy_weights(config, dtype);
    const Decoded on = greedy("helix:kvp=3,tpa=1", config, weights, 3, 12);
    const Decoded off = greedy("helix:kvp=3,tpa=1,hopb=off", config, weights, 3, 12);
    EXPECT_EQ(on.tokens, off.tokens);
    EXPECT_EQ(on.logits, off.logits) << name_of(dtype);
  }
}

// What slices have of sequences that prefill and decode have grown, however they grew, differs by a chunk at most.
TEST(CacheShards, AreBalancedWithinAChunkASequence) {
  EXPECT_TRUE(rc::check("imbalance", [] {
    const auto slices = *rc::gen::inRange(1, 9), batch = *rc::gen::inRange(1, 6);
    const CacheShards shards{slices, *rc::gen::inRange<std::int64_t>(1, 40)};
    std::vector<std::int64_t> rows(static_cast<std::size_t>(slices));
    for (int b = 0; b < batch; ++b) {
      const auto prompt = *rc::gen::inRange<std::int64_t>(0, 3000), decoded = *rc::gen::inRange<std::int64_t>(0, 300);
      std::vector<std::int64_t> counted(static_cast<std::size_t>(slices));
      for (std::int64_t p = 0; p < prompt + decoded; ++p) ++counted[static_cast<std::size_t>(shards.owner(p))];
      for (int slice = 0; slice < slices; ++slice) {
        RC_ASSERT(counted[static_cast<std::size_t>(slice)] == shards.count(slice, prompt + decoded));
        rows[static_cast<std::size_t>(slice)] += counted[static_cast<std::size_t>(slice)];
      }
    }
    const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
    RC_ASSERT(*most - *least <= batch * shards.chunk);
  }));
}

}  // namespace
}  // namespace isomer
