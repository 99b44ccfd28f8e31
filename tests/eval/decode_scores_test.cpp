// Which rows are scored in which mode, and what is made of their logits.
#include "eval/decode_scores.h"

#include <gmock/gmock.h>

#include <cmath>

#include "convert/convert_fixture.h"

namespace isomer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Ints = std::vector<std::int32_t>;

constexpr std::int64_t kVocab = 6;

/// Documents of consecutive tokens, modulo kVocab.
TokenDataset documents(const std::vector<int>& lengths) {
  std::vector<Ints> all;
  int next = 0;
  for (const int length : lengths) {
    Ints& document = all.emplace_back();
    for (int i = 0; i < length; ++i) document.push_back(next++ % kVocab);
  }
  return TokenDataset::from_tokens(all, kVocab);
}

ModelConfig config_of(std::int64_t positions = 64) {
  ModelConfig config = testing::small_config({});
  config.vocab_size = kVocab;
  config.max_position_embeddings = positions;
  return config;
}

/// Says that the token after x is x + 1, with a logit that tells how the row was computed.
class Fake : public LogitSource {
 public:
  explicit Fake(float exact, float decoded) : exact_(exact), decoded_(decoded) {}
  Tensor logits(RankContext&, std::span<const ScoredSequence> sequences) override {
    std::int64_t count = 0, row = 0;
    for (const ScoredSequence& s : sequences) count += std::ssize(s.ids);
    const Tensor result = Tensor::unrecorded("logits", DType::f32, {count, kVocab});
    std::fill_n(result.data<float>(), result.numel(), 0.0f);
    for (const ScoredSequence& s : sequences) {
      for (std::int64_t i = 0; i < std::ssize(s.ids); ++i, ++row) {
        const std::int64_t next = (s.ids[static_cast<std::size_t>(i)] + 1) % kVocab;
        result.data<float>()[row * kVocab + next] = i < s.exact_rows ? exact_ : decoded_;
      }
    }
    return result;
  }

 private:
  float exact_, decoded_;
};
LogitSourceFactory fake(float exact, float decoded) {
  return [=](RankContext&) { return std::make_unique<Fake>(exact, decoded); };
}
double nats_of(double logit) { return std::log(std::exp(logit) + kVocab - 1) - logit; }

TEST(ScoredSequences, SplitAtDocumentsAndKeepThePrefix) {
  const WindowOrder windows(documents({7, 4, 9}), 8, 3);
  const auto first = scored_sequences(windows, 0, ScoreMode::decode);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_THAT(first[0].ids, ElementsAre(0, 1, 2, 3, 4, 5, 0));
  EXPECT_THAT(first[0].targets, ElementsAre(-1, -1, -1, 4, 5, 0, -1));
  EXPECT_EQ(first[0].exact_rows, 3);
  EXPECT_THAT(first[1].ids, ElementsAre(1));
  EXPECT_THAT(first[1].targets, ElementsAre(2));
  EXPECT_EQ(first[1].exact_rows, 0);
  const auto second = scored_sequences(windows, 1, ScoreMode::decode);  // from token 5 on
  ASSERT_EQ(second.size(), 2U);
  EXPECT_THAT(second[0].ids, ElementsAre(1, 2, 3, 4));  // the second document, of whose tokens one is context
  EXPECT_EQ(second[0].exact_rows, 1);
  EXPECT_THAT(second[1].ids, ElementsAre(5, 0));
  EXPECT_EQ(second[1].exact_rows, 0);
}

TEST(ScoredSequences, EveryModeScoresTheSame) {
  for (const auto& [window, overlap] : {std::pair{8, 3}, {5, 0}, {9, 8}, {64, 1}}) {
    const WindowOrder windows(documents({7, 4, 9, 1, 12}), window, overlap);
    for (std::int64_t j = 0; j < windows.num_windows(); ++j) {
      const auto decode = scored_sequences(windows, j, ScoreMode::decode);
      const auto prefill = scored_sequences(windows, j, ScoreMode::prefill);
      const auto every = scored_sequences(windows, j, ScoreMode::every_position);
      ASSERT_EQ(decode.size(), prefill.size());
      ASSERT_EQ(decode.size(), every.size());
      for (std::size_t i = 0; i < decode.size(); ++i) {
        EXPECT_EQ(decode[i].targets, prefill[i].targets);
        EXPECT_EQ(decode[i].targets, every[i].targets);
        EXPECT_EQ(prefill[i].exact_rows, std::ssize(prefill[i].ids));
        EXPECT_EQ(every[i].exact_rows, 0);
        for (std::int64_t row = 0; row < decode[i].exact_rows; ++row) {
          EXPECT_EQ(decode[i].targets[static_cast<std::size_t>(row)], -1);
        }
      }
    }
  }
}

TEST(ScoreWindows, SumsWhatTheRowsOfTheModeSay) {
  const WindowOrder windows(documents({30}), 8, 3);
  const auto measure = [&](ScoreMode mode, std::int64_t batch) {
    return score_windows(config_of(), windows, {.mode = mode, .batch = batch, .bytes_of_token = Ints(kVocab, 2)},
                         fake(3, 1));
  };
  for (const std::int64_t batch : {1, 4}) {
    const Perplexity decode = measure(ScoreMode::decode, batch);
    EXPECT_EQ(decode.num_tokens, 29 - 3);  // all targets but the first window's context
    EXPECT_EQ(decode.num_bytes, 2 * 26);
    EXPECT_NEAR(decode.nats_per_token(), nats_of(1), 1e-6);
    EXPECT_NEAR(measure(ScoreMode::every_position, batch).nats_per_token(), nats_of(1), 1e-6);
    const Perplexity prefill = measure(ScoreMode::prefill, batch);
    EXPECT_EQ(prefill.num_tokens, decode.num_tokens);
    EXPECT_NEAR(prefill.nats_per_token(), nats_of(3), 1e-6);
  }
}

TEST(ScoreWindows, WrongInputIsNamed) {
  const auto why = [&](const WindowOrder& windows, const ScoringOptions& options, std::int64_t positions = 64) {
    return message_of([&] { score_windows(config_of(positions), windows, options, fake(1, 1)); });
  };
  const TokenDataset text = documents({30});
  EXPECT_THAT(why({text, 8, 0}, {}), HasSubstr("--overlap 0"));
  EXPECT_THAT(why({text, 8, 3}, {.batch = 0}), HasSubstr("--batch 0"));
  EXPECT_THAT(why({text, 8, 3}, {}, 7), HasSubstr("max_position_embeddings 7"));
  EXPECT_THAT(why({documents({6}), 64, 32}, {}), HasSubstr("no token to score"));
  EXPECT_THAT(message_of([&] { parse_score_mode("all"); }), HasSubstr("prefill, every-position and decode"));
}

TEST(Divergence, IsWhatItsEquationsSay) {
  const std::vector<float> p_logits = {1, 0, -1, 0.5f}, q_logits = {0, 1, -1, 2};
  const auto probabilities = [](const std::vector<float>& z) {
    double sum = 0;
    std::vector<double> p;
    for (const float value : z) sum += std::exp(static_cast<double>(value));
    for (const float value : z) p.push_back(std::exp(static_cast<double>(value)) / sum);
    return p;
  };
  const std::vector<double> p = probabilities(p_logits), q = probabilities(q_logits);
  double kl = 0;
  for (std::size_t i = 0; i < 4; ++i) kl += p[i] * std::log(p[i] / q[i]);
  DivergenceMeter meter;
  meter.add(p_logits, q_logits, 1);
  meter.add(p_logits, p_logits, 2);
  const Divergence d = meter.result();
  EXPECT_EQ(d.num_tokens, 2);
  EXPECT_NEAR(d.mean_kl, kl / 2, 1e-12);
  EXPECT_NEAR(d.percentile(100), kl, 1e-12);
  EXPECT_EQ(d.percentile(50), 0);
  EXPECT_EQ(d.top1_agreements, 1);
  EXPECT_NEAR(d.mean_change, (q[1] - p[1]) / 2, 1e-12);
  EXPECT_NEAR(d.root_mean_square_change, std::abs(q[1] - p[1]) / std::sqrt(2.0), 1e-12);
  EXPECT_NEAR(d.nats_base, -std::log(p[1]) - std::log(p[2]), 1e-12);
  EXPECT_NEAR(d.nats_model, -std::log(q[1]) - std::log(p[2]), 1e-12);
  EXPECT_THAT(message_of([&] { meter.add(p_logits, std::vector<float>(3, 0), 0); }), HasSubstr("vocabulary of 4"));
}

TEST(Divergence, PercentilesAreOrderStatistics) {
  Divergence d;
  for (int i = 1; i <= 1000; ++i) d.kl.push_back(i);
  EXPECT_EQ(d.percentile(50), 500);
  EXPECT_EQ(d.percentile(99), 990);
  EXPECT_EQ(d.percentile(99.9), 999);
  EXPECT_EQ(d.percentile(100), 1000);
  d.kl.resize(1);
  EXPECT_EQ(d.percentile(50), 1);
}

TEST(Divergence, StandardErrorsAreThoseOfBlocks) {
  DivergenceMeter meter;
  const std::vector<float> flat = {0, 0}, steep = {0, 3};
  for (std::int64_t i = 0; i < 2 * kErrorBlock + 7; ++i) meter.add(flat, i < kErrorBlock ? flat : steep, 0);
  const Divergence d = meter.result();
  // Two blocks of means 0 and m: the standard deviation is m/√2, the error of their mean m/2.
  EXPECT_NEAR(d.kl_error, d.percentile(100) / 2, 1e-12);
  const double step = std::log((1 + std::exp(3.0)) / 2);
  EXPECT_NEAR(d.nats_difference_error, step / 2, 1e-12);
  DivergenceMeter few;
  few.add(flat, steep, 0);
  EXPECT_TRUE(std::isnan(few.result().kl_error));
}

TEST(Divergence, TheBaseIsAlwaysExact) {
  const WindowOrder windows(documents({30}), 8, 3);
  const auto mean = [&](ScoreMode mode) {
    return measure_divergence(config_of(), windows, {.mode = mode, .batch = 2}, fake(3, 1), fake(3, 1)).mean_kl;
  };
  EXPECT_EQ(mean(ScoreMode::prefill), 0);
  EXPECT_GT(mean(ScoreMode::decode), 0.01);
  EXPECT_NEAR(mean(ScoreMode::decode), mean(ScoreMode::every_position), 1e-9);
}

}  // namespace
}  // namespace isomer
