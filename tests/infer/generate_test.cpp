#include "infer/generate.h"

#include <gmock/gmock.h>

#include "engine_fixture.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::HasSubstr;

TEST(Sampling, GreedyTakesTheFirstOfTheLargest) {
  EXPECT_EQ(sample_token(std::vector<double>{1, 4, 4, 2}, {}, 0), 1);
  EXPECT_EQ(sample_token(std::vector<double>{-3}, {.temperature = 1, .seed = 5}, 3), 0);
}

TEST(Sampling, FrequenciesAreTheProbabilities) {
  const std::vector<double> logits = {std::log(0.5), std::log(0.3), std::log(0.15), std::log(0.05)};
  const auto frequencies = [&](const Sampling& sampling) {
    std::vector<double> f(4, 0);
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) f[static_cast<std::size_t>(sample_token(logits, sampling, i))] += 1.0 / kDraws;
    return f;
  };
  // Four standard deviations of 20000 draws: 0.014.
  const auto plain = frequencies({.temperature = 1, .seed = 1});
  EXPECT_NEAR(plain[0], 0.5, 0.014);
  EXPECT_NEAR(plain[1], 0.3, 0.014);
  EXPECT_NEAR(plain[3], 0.05, 0.014);
  // At temperature ½ probabilities are squared: 0.25, 0.09, 0.0225, 0.0025 of 0.365.
  const auto cold = frequencies({.temperature = 0.5, .seed = 1});
  EXPECT_NEAR(cold[0], 0.25 / 0.365, 0.014);
  // The first two reach 0.8, and 0.75 is passed by the second.
  const auto nucleus = frequencies({.temperature = 1, .top_p = 0.75, .seed = 2});
  EXPECT_NEAR(nucleus[0], 0.5 / 0.8, 0.014);
  EXPECT_EQ(nucleus[2] + nucleus[3], 0);
  EXPECT_EQ(frequencies({.temperature = 1, .top_p = 0.01, .seed = 2})[0], 1.0 * frequencies({})[0]);
  EXPECT_NE(frequencies({.temperature = 1, .seed = 1}), frequencies({.temperature = 1, .seed = 9}));
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

TEST(Sampling, RefusesNonsense) {
  EXPECT_THAT(message_of([] { check_sampling({.temperature = -1}); }), HasSubstr("temperature is -1"));
  EXPECT_THAT(message_of([] { check_sampling({.temperature = std::nan("")}); }), HasSubstr("temperature"));
  EXPECT_THAT(message_of([] { check_sampling({.top_p = 0}); }), HasSubstr("top_p is 0"));
  EXPECT_THAT(message_of([] { check_sampling({.top_p = 1.5}); }), HasSubstr("top_p is 1.5"));
  EXPECT_THROW(sample_token(std::vector<double>{1, std::nan("")}, {}, 0), Error);
}

/// What repeated whole-sequence forwards choose.
Ids greedy_by_hand(const ModelConfig& config, const ModelWeights& weights, Ids ids, int count) {
  Ids chosen;
  for (int i = 0; i < count; ++i) {
    const auto logits = engine_logits({.prompt = static_cast<std::int64_t>(ids.size())}, config, weights, ids);
    const auto row = std::span(logits).last(static_cast<std::size_t>(config.vocab_size));
    ids.push_back(sample_token(row, {}, 0));
    chosen.push_back(ids.back());
  }
  return chosen;
}

std::vector<Ids> generated(const std::string& layout, const std::vector<TextRequest>& requests,
                           const GenerateOptions& options = {}, std::int64_t cache_tokens = 400) {
  const ModelConfig config = latent_config();
  std::vector<Ids> tokens;
  with_engine({.layout = layout}, config, noisy_weights(config, DType::f32), cache_tokens,
              [&](RankContext& ctx, Engine& engine) {
                const Generated result = generate(ctx, engine, requests, options);
                if (ctx.rank() == 0) tokens = result.tokens;
                EXPECT_EQ(engine.cache().num_free_pages(), engine.cache().options().num_pages);
              });
  return tokens;
}

TEST(Generate, GreedyIsWhatWholeForwardsChoose) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const Ids first = some_ids(9, 31), second = some_ids(40, 32);
  const Ids of_first = greedy_by_hand(config, weights, first, 12),
            of_second = greedy_by_hand(config, weights, second, 5);
  for (const char* layout : {"tp:1", "tp:2", "kvp:2"}) {
    const auto tokens = generated(layout, {{first, 12}, {second, 5}});
    EXPECT_EQ(tokens, (std::vector<Ids>{of_first, of_second})) << layout;
  }
  // An end-of-text token ends a request and is not given out.
  const auto at = std::find(of_first.begin(), of_first.end(), of_first[4]);
  const auto ended = generated("tp:2", {{first, 12}, {second, 5}}, {.eos = *at});
  EXPECT_EQ(ended[0], Ids(of_first.begin(), at));
}

TEST(Generate, SamplesDependOnTheSeedAndNotOnTheLayout) {
  const Ids prompt = some_ids(9, 31);
  const auto with_seed = [&](std::uint64_t seed, const char* layout) {
    return generated(layout, {{prompt, 20, {.temperature = 1, .top_p = 0.9, .seed = seed}}})[0];
  };
  EXPECT_EQ(with_seed(1, "tp:1"), with_seed(1, "kvp:2"));
  EXPECT_NE(with_seed(1, "tp:1"), with_seed(2, "tp:1"));
  EXPECT_EQ(with_seed(1, "tp:1").size(), 20u);
}

TEST(Generate, RefusesBeforeAnythingRuns) {
  const auto refused = [&](const std::vector<TextRequest>& requests, std::int64_t cache_tokens) {
    return message_of([&] { generated("tp:1", requests, {}, cache_tokens); });
  };
  EXPECT_THAT(refused({{{}, 3}}, 64), HasSubstr("the prompt is empty"));
  EXPECT_THAT(refused({{some_ids(3), 0}}, 64), HasSubstr("0 new tokens: ask for at least 1"));
  EXPECT_THAT(refused({{some_ids(1000), 26}}, 2000), HasSubstr("ask for at most 25 tokens"));
  EXPECT_EQ(refused({{some_ids(1000), 1}}, 1000), "accepted");
  const std::string small = refused({{some_ids(30), 35}, {some_ids(3), 1}}, 64);
  EXPECT_THAT(small, HasSubstr("67 tokens of 2 sequences need 9 pages of 8 tokens, 8 are free"));
  EXPECT_THAT(small, HasSubstr("at least 72 tokens"));
}

}  // namespace
}  // namespace isomer
