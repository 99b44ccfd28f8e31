// Prefill and decode under layouts of their own: the text that one group writes, pieces that cover what is needed, and
// what travels.
#include <gmock/gmock.h>

#include "engine_fixture.h"
#include "full_tests.h"
#include "infer/generate.h"
#include "infer/hand_over.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::HasSubstr;

struct Separated {
  std::string prefill, decode;
  bool apart = true;
};

/// Tokens of two requests, by every rank of the decode layout.
std::vector<Ids> separated_tokens(const ModelConfig& config, const Separated& s, bool drop = false) {
  SeparatedOptions options{.apart = s.apart};
  const auto engine = [&](const std::string& layout, std::int64_t tokens) {
    return EngineOptions{
        .config = config, .layout = parse_decode_layout(layout, config), .cache_tokens = tokens, .page_tokens = 8};
  };
  options.prefill = engine(s.prefill, 0);
  options.decode = engine(s.decode, 400);
  const std::vector<TextRequest> requests = {{some_ids(45, 31), 12}, {some_ids(9, 32), 5}};
  const ModelWeights weights = noisy_weights(config, DType::f32);
  std::vector<Ids> tokens;
  GroupOptions group{.num_ranks = options.num_ranks(), .threads_per_rank = 1};
  group.timeout_s = 20;
  run_group(group, [&](RankContext& ctx) {
    ctx.memory().poison = true;
    ctx.comm().drop_transfers(drop);
    const Generated result = generate_separated(ctx, options, weights, requests);
    if (ctx.rank() == 0) tokens = result.tokens;
    EXPECT_EQ(result.tokens.empty(), ctx.rank() >= options.decode.layout.devices());
  });
  return tokens;
}

std::vector<Ids> tokens_of_one_rank(const ModelConfig& config) {
  std::vector<Ids> tokens;
  with_engine({}, config, noisy_weights(config, DType::f32), 400, [&](RankContext& ctx, Engine& engine) {
    tokens = generate(ctx, engine, {{some_ids(45, 31), 12}, {some_ids(9, 32), 5}}).tokens;
  });
  return tokens;
}

TEST(HandOver, GivesTheTextOfOneGroup) {
  const ModelConfig latent = latent_config(), grouped = grouped_config();
  const auto expected_latent = tokens_of_one_rank(latent), expected_grouped = tokens_of_one_rank(grouped);
  std::vector<Separated> cases = {{"tp:1", "kvp:2"},
                                  {"kvp:2", "exact-latent:2"},
                                  {"tp:2", "helix:kvp=2,tpa=1", false},
                                  {"exact-latent:2,rope=split", "tp:1"}};
  if (full_tests()) {
    const std::vector<std::string> layouts = {
        "tp:1", "tp:2", "tp:4", "kvp:2", "kvp:4", "exact-latent:2", "exact-latent:4,rope=split"};
    for (const auto& prefill : layouts) {
      for (const auto& decode : layouts) {
        cases.push_back({prefill, decode, true});
        cases.push_back({prefill, decode, false});
      }
    }
    cases.push_back({"gla:g=2,tp=2", "tp:2", true});  // its prefill is exact
  }
  for (const Separated& s : cases) {
    EXPECT_EQ(separated_tokens(latent, s), expected_latent) << s.prefill << " " << s.decode << " " << s.apart;
    const auto fits = [&](const std::string& l) {
      return why_step_unfit(parse_decode_layout(l, grouped), grouped).empty();
    };
    if (!fits(s.prefill) || !fits(s.decode)) continue;
    EXPECT_EQ(separated_tokens(grouped, s), expected_grouped) << s.prefill << " " << s.decode << " " << s.apart;
  }
  EXPECT_EQ(separated_tokens(grouped, {"tp:4", "kvp:2", false}), expected_grouped);
  EXPECT_EQ(separated_tokens(grouped, {"kvp:2", "tp:4"}), expected_grouped);
}

// Every unit that a receiver needs comes from one sender that has it, once.
TEST(HandOver, PiecesCoverEveryRowOnce) {
  const ModelConfig latent = latent_config();
  const std::vector<std::string> layouts = {"tp:2", "kvp:4", "gla:g=2,tp=2", "exact-latent:4,rope=split",
                                            "exact-latent:2"};
  for (const auto& prefill : layouts) {
    for (const auto& decode : layouts) {
      const CacheGroup from{parse_decode_layout(prefill, latent), 0};
      const CacheGroup to{parse_decode_layout(decode, latent), from.end_rank()};
      for (int slice = 0; slice < from.layout.shards.kvp; ++slice) {
        std::map<int, std::vector<int>> got;
        for (const CachePiece& p : hand_over_pieces(latent, from, slice, to)) {
          const RankCache sender = rank_cache_of(from.layout, latent, p.from);
          EXPECT_EQ(sender.slice, slice);
          for (const IndexRange& u : p.units) {
            const bool has = std::any_of(sender.columns.begin(), sender.columns.end(),
                                         [&](const IndexRange& c) { return c.begin <= u.begin && u.end() <= c.end(); });
            EXPECT_TRUE(has) << prefill << " " << decode;
            got[p.to].resize(static_cast<std::size_t>(latent.latent_width()));
            for (auto i = u.begin; i < u.end(); ++i) ++got[p.to][static_cast<std::size_t>(i)];
          }
        }
        for (int rank = to.first_rank; rank < to.end_rank(); ++rank) {
          std::vector<int> needed(static_cast<std::size_t>(latent.latent_width()));
          for (const IndexRange& c : rank_cache_of(to.layout, latent, rank - to.first_rank).columns) {
            for (auto i = c.begin; i < c.end(); ++i) ++needed[static_cast<std::size_t>(i)];
          }
          EXPECT_EQ(got[rank], needed) << prefill << " " << decode << " slice " << slice << " rank " << rank;
        }
      }
    }
  }
}

TEST(HandOver, SendsARowOnceToEachWhoNeedsIt) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  SeparatedOptions options{.apart = true};
  options.prefill = {.config = config, .layout = parse_decode_layout("tp:2", config)};
  options.decode = {.config = config, .layout = parse_decode_layout("exact-latent:2", config), .cache_tokens = 64};
  run_group({.num_ranks = 4, .threads_per_rank = 1}, [&](RankContext& ctx) {
    generate_separated(ctx, options, weights, {{some_ids(30), 2}});
    std::int64_t sent = 0;
    for (const LedgerEntry& entry : ctx.ledger().entries()) {
      if (entry.tensor == "cache keys") sent += entry.bytes_sent;
    }
    // Half of the latent and the rope key to one receiver, from each of the two that have all.
    EXPECT_EQ(sent, ctx.rank() < 2 ? 0 : 30 * config.num_hidden_layers * (24 / 2 + 8) * 4) << ctx.rank();
  });
}

TEST(HandOver, FailsWithoutCommunication) {
  const ModelConfig config = latent_config();
  std::vector<Ids> tokens;
  try {
    tokens = separated_tokens(config, {"tp:1", "kvp:1"}, true);
  } catch (const Error&) {
    return;  // poison in the logits
  }
  EXPECT_NE(tokens, tokens_of_one_rank(config));
}

TEST(HandOver, NamesGroupsThatCannotBeServed) {
  const ModelConfig latent = latent_config(), grouped = grouped_config();
  const auto why = [](const ModelConfig& config, const std::string& from, int first, const std::string& to, int ranks) {
    const DecodeLayout a = parse_decode_layout(from, config), b = parse_decode_layout(to, config);
    return why_hand_over_unfit(config, {a, first}, {b, 0}, ranks);
  };
  EXPECT_EQ(why(latent, "tp:2", 2, "kvp:2", 4), "");
  EXPECT_EQ(why(latent, "tp:4", 0, "kvp:2", 4), "");
  EXPECT_THAT(why(latent, "tp:2", 1, "kvp:2", 3), HasSubstr("prefill 'tp:2' on ranks 1 to 2 and decode 'kvp:2'"));
  EXPECT_THAT(why(latent, "tp:2", 2, "kvp:2", 3), HasSubstr("apart need 4 ranks, there are 3"));
  EXPECT_THAT(why(latent, "tp:2", 2, "pp:2", 4), HasSubstr("layers lie on several stages"));
  EXPECT_THAT(why(latent, "tp:2", 2, "dp-ep:2", 4), HasSubstr("of one rank alone"));
  EXPECT_THAT(why(grouped, "exact-latent:2", 2, "tp:2", 4), HasSubstr("prefill layout 'exact-latent:2': it cuts"));
  EXPECT_THAT(why(latent, "tp:2", 2, "tpla:2", 4), HasSubstr("decode layout 'tpla"));
}

}  // namespace
}  // namespace isomer
