#include "eval/perplexity.h"

#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "sharding/sequence_layout.h"
#include "train/language_model.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using Ints = std::vector<std::int32_t>;

constexpr std::int32_t kVocab = 40;

ModelConfig small_config() {
  ModelConfig config = load_model_config("tiny-mla");
  config.vocab_size = kVocab;
  config.num_hidden_layers = 2;
  config.max_position_embeddings = 100;
  return config;
}

/// Wide enough that losses differ from ln V by tens of per cent, so that a wrong context shows.
ModelWeights small_weights(const ModelConfig& config, DType dtype = DType::f32) {
  return initial_model_weights(config, 3, dtype, 0.15);
}

TokenDataset random_documents(const std::vector<int>& lengths) {
  std::mt19937 random(5);
  std::vector<Ints> documents;
  for (const int length : lengths) {
    Ints& document = documents.emplace_back();
    for (int i = 0; i < length; ++i) document.push_back(static_cast<std::int32_t>(random() % kVocab));
  }
  return TokenDataset::from_tokens(documents, kVocab);
}

/// −ln p of the token after `context`, computed from this context alone.
double loss_after(const ModelConfig& config, const ModelWeights& weights, const Ints& context, std::int32_t next) {
  double loss = 0;
  run_group({}, [&](RankContext& ctx) {
    const auto size = context.size();
    Sample sample{context, Ints(size, -1), Ints(size, 0), Ints(size, 0)};
    sample.targets.back() = next;
    LanguageModel model(
        ctx, {.config = config, .layout = parse_layout("explicit:1"), .seq = static_cast<std::int64_t>(size)});
    loss = model.token_losses(ctx, weights, {&sample, 1}).back();
  });
  return loss;
}

/// The convention, token by token: target t (the token at t + 1) in the first window that holds it.
double direct_nats(const ModelConfig& config, const ModelWeights& weights, const TokenDataset& data,
                   std::int64_t window, std::int64_t overlap, std::int64_t* scored) {
  double nats = 0;
  *scored = 0;
  for (std::int64_t t = 0; t + 1 < data.num_tokens(); ++t) {
    const std::int64_t document = data.document_of(t);
    if (data.document_of(t + 1) != document) continue;
    std::int64_t begin = 0;
    while (begin + window <= t) begin += window - overlap;
    begin = std::max(begin, data.document_begin(document));
    Ints tokens(static_cast<std::size_t>(t + 2 - begin));
    data.read(begin, tokens);
    const std::int32_t next = tokens.back();
    tokens.pop_back();
    nats += loss_after(config, weights, tokens, next);
    ++*scored;
  }
  return nats;
}

PerplexityOptions options_for(const std::string& layout, DType dtype = DType::f32, std::int64_t batch = 1) {
  PerplexityOptions options{.layout = layout, .dtype = dtype, .batch = batch};
  options.group.num_ranks = sequence_layout(parse_layout(layout)).num_ranks();
  options.bytes_of_token = Ints(kVocab, 2);
  return options;
}

struct Windows {
  std::vector<int> documents;
  std::int64_t window, overlap, batch;
};

class PerplexityWindows : public ::testing::TestWithParam<Windows> {};

TEST_P(PerplexityWindows, AgreeWithTheConventionTokenByToken) {
  const Windows& c = GetParam();
  const ModelConfig config = small_config();
  const ModelWeights weights = small_weights(config);
  const TokenDataset data = random_documents(c.documents);
  std::int64_t scored = 0;
  const double expected = direct_nats(config, weights, data, c.window, c.overlap, &scored);
  const Perplexity got = measure_perplexity(config, weights, WindowOrder(data, c.window, c.overlap),
                                            options_for("explicit:1", DType::f32, c.batch));
  EXPECT_EQ(got.num_tokens, scored);
  EXPECT_EQ(got.num_bytes, 2 * scored);
  // Float32 sums in other orders; a token of another context differs by a thousandth and more.
  EXPECT_NEAR(got.nats, expected, 1e-5 * expected);
  EXPECT_NEAR(got.per_token() / std::exp(expected / static_cast<double>(scored)), 1, 1e-4);
  EXPECT_NEAR(got.bits_per_byte(), expected / std::log(2.0) / static_cast<double>(2 * scored), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Conventions, PerplexityWindows,
                         ::testing::Values(Windows{{19}, 8, 0, 1}, Windows{{19}, 8, 5, 2}, Windows{{19}, 8, 7, 3},
                                           Windows{{5, 1, 9}, 6, 2, 2}, Windows{{7}, 32, 0, 1}, Windows{{9}, 8, 3, 1},
                                           Windows{{6}, 1, 0, 4}, Windows{{3, 3, 3}, 3, 1, 1}));

TEST(PerplexityWindows, OverlapChangesTheResult) {
  const ModelConfig config = small_config();
  const ModelWeights weights = small_weights(config);
  const TokenDataset data = random_documents({40});
  const auto nats = [&](std::int64_t overlap) {
    return measure_perplexity(config, weights, WindowOrder(data, 8, overlap), options_for("explicit:1")).nats;
  };
  EXPECT_GT(std::abs(nats(0) - nats(6)), 1e-2);
}

TEST(PerplexityWindows, LimitLooksAtTheFirstTokensOnly) {
  const TokenDataset data = random_documents({30});
  const ModelConfig config = small_config();
  const ModelWeights weights = small_weights(config);
  const auto limited = measure_perplexity(config, weights, WindowOrder(data, 8, 2, 11), options_for("explicit:1"));
  EXPECT_EQ(limited.num_tokens, 11);
  EXPECT_EQ(WindowOrder(data, 8, 2, 11).num_windows(), 2);
  EXPECT_EQ(WindowOrder(data, 8, 2, 1000).num_windows(), WindowOrder(data, 8, 2).num_windows());
}

TEST(PerplexityLayouts, AgreeWithOneRank) {
  const ModelConfig config = small_config();
  const TokenDataset data = random_documents({60, 25, 70});
  const WindowOrder windows(data, 32, 8);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const ModelWeights weights = small_weights(config, dtype);
    const Perplexity one = measure_perplexity(config, weights, windows, options_for("explicit:1", dtype));
    for (const std::string layout : {"explicit:2", "absorbed:4", "laga:2", "laga:4", "ring:2", "latent-gather:4",
                                     "latent-ring:2", "laga:2,ring:2", "laga:2,dp:2", "explicit:1,dp:3"}) {
      SCOPED_TRACE(layout);
      const Perplexity many = measure_perplexity(config, weights, windows, options_for(layout, dtype, 2));
      EXPECT_EQ(many.num_tokens, one.num_tokens);
      EXPECT_EQ(many.num_bytes, one.num_bytes);
      // In bfloat16 a few tokens near a tie of their router go to other experts; each moves the mean by some hundredths
      // at most. Float32 has only the order of sums.
      EXPECT_NEAR(many.nats_per_token(), one.nats_per_token(), dtype == DType::f32 ? 1e-4 : 6e-2);
    }
  }
}

template <class Call>
void expect_refused(Call call, const std::vector<std::string>& parts) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << parts.front();
  } catch (const std::invalid_argument& error) {
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(PerplexityRefusals, NameValueAndLimit) {
  const ModelConfig config = small_config();
  const ModelWeights weights = small_weights(config);
  const TokenDataset data = random_documents({20});
  const auto measure = [&](const TokenDataset& text, std::int64_t window, const std::string& layout) {
    measure_perplexity(config, weights, WindowOrder(text, window, 0), options_for(layout));
  };
  expect_refused([&] { WindowOrder(data, 0, 0); }, {"--window 0", "at least 1"});
  expect_refused([&] { WindowOrder(data, 8, 8); }, {"--overlap 8", "0 to 7"});
  expect_refused([&] { WindowOrder(data, 8, -1); }, {"--overlap -1"});
  expect_refused([&] { WindowOrder(data, 8, 0, -1); }, {"--limit -1"});
  expect_refused([&] { WindowOrder(random_documents({1}), 8, 0); }, {"1 tokens", "at least 2"});
  expect_refused([&] { measure(data, 101, "explicit:1"); }, {"--window 101", "max_position_embeddings 100"});
  expect_refused([&] { measure(data, 8, "laga:3"); }, {"laga:3"});
  expect_refused([&] { measure(random_documents({1, 1, 1}), 8, "explicit:1"); }, {"no token of the text"});
  const TokenDataset larger = TokenDataset::from_tokens({{0, 1}}, 41);
  expect_refused([&] { measure(larger, 8, "explicit:1"); }, {"41 tokens", "vocabulary of 40"});
}

}  // namespace
}  // namespace isomer
