#include "eval/ngram.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>

namespace isomer {
namespace {

using Ints = std::vector<std::int32_t>;
using Texts = std::vector<Ints>;

std::vector<NgramModel::Symbols> spans_of(const Texts& texts) { return {texts.begin(), texts.end()}; }

/// The definition, word for word, on maps of vectors: begin symbols are −1.
class NaiveKneserNey {
 public:
  NaiveKneserNey(const Texts& texts, int order, std::int64_t vocab) : order_(order), vocab_(vocab) {
    counts_.resize(static_cast<std::size_t>(order) + 1);
    for (const Ints& text : texts) {
      Ints padded(static_cast<std::size_t>(order - 1), -1);
      padded.insert(padded.end(), text.begin(), text.end());
      for (auto end = padded.begin() + order; end <= padded.end(); ++end) counts_[order][Ints(end - order, end)] += 1;
    }
    for (int k = order - 1; k >= 1; --k) {
      std::map<Ints, std::set<std::int32_t>> before;
      for (const auto& [gram, count] : counts_[k + 1]) before[Ints(gram.begin() + 1, gram.end())].insert(gram[0]);
      for (const auto& [gram, symbols] : before) counts_[k][gram] = static_cast<double>(symbols.size());
    }
  }

  /// D of order k for a count.
  double discount(int k, double count) const {
    std::map<double, double> n;
    for (const auto& [gram, c] : counts_[k]) n[c] += 1;
    const double n1 = n[1], n2 = n[2], n3 = n[3], n4 = n[4];
    if (n1 * n2 * n3 * n4 == 0) return 0.5;
    const double y = n1 / (n1 + 2 * n2);
    const double d = count < 2 ? 1 - 2 * y * n2 / n1 : count < 3 ? 2 - 3 * y * n3 / n2 : 3 - 4 * y * n4 / n3;
    return std::min(std::max(d, 0.05), std::min(count, 3.0));
  }

  double probability(Ints context, std::int32_t symbol) const {
    context.insert(context.begin(), static_cast<std::size_t>(order_), -1);
    return of_order(order_, context, symbol);
  }

 private:
  double of_order(int k, const Ints& context, std::int32_t symbol) const {
    if (k == 0) return 1.0 / static_cast<double>(vocab_);
    Ints gram(context.end() - (k - 1), context.end());
    double total = 0, freed = 0;
    for (const auto& [other, count] : counts_[k]) {
      if (!std::equal(gram.begin(), gram.end(), other.begin())) continue;
      total += count;
      freed += discount(k, count);
    }
    const double lower = of_order(k - 1, context, symbol);
    if (total == 0) return lower;
    gram.push_back(symbol);
    const auto found = counts_[k].find(gram);
    const double own = found == counts_[k].end() ? 0 : found->second - discount(k, found->second);
    return own / total + freed / total * lower;
  }

  int order_;
  std::int64_t vocab_;
  std::vector<std::map<Ints, double>> counts_;
};

/// Texts in which some symbols are far more frequent than others, and follow one another.
Texts skewed_texts(std::uint32_t seed, std::int32_t vocab, const std::vector<int>& lengths) {
  std::mt19937 random(seed);
  Texts texts;
  for (const int length : lengths) {
    Ints& text = texts.emplace_back();
    std::int32_t last = 0;
    for (int i = 0; i < length; ++i) {
      const auto step = static_cast<std::int32_t>(std::min(random() % 7, random() % 5));
      text.push_back(last = (last * 3 + step) % vocab);
    }
  }
  return texts;
}

struct Case {
  int order;
  std::int32_t vocab;
  std::vector<int> lengths;
};

class Ngram : public ::testing::TestWithParam<Case> {};

TEST_P(Ngram, AgreesWithTheDefinition) {
  const Case& c = GetParam();
  const Texts texts = skewed_texts(7, c.vocab, c.lengths), others = skewed_texts(8, c.vocab, {0, 1, 9});
  const NgramModel model(spans_of(texts), {.order = c.order, .vocab_size = c.vocab});
  const NaiveKneserNey naive(texts, c.order, c.vocab);
  for (const Texts& where : {texts, others}) {
    for (const Ints& text : where) {
      for (std::size_t i = 0; i < std::min<std::size_t>(text.size(), 12); ++i) {
        const Ints before(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(i));
        double sum = 0;
        for (std::int32_t symbol = 0; symbol < c.vocab; ++symbol) {
          const double p = model.probability(before, symbol);
          EXPECT_GT(p, 0);
          EXPECT_NEAR(p, naive.probability(before, symbol), 1e-12);
          sum += p;
        }
        EXPECT_NEAR(sum, 1, 1e-12);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, Ngram,
                         ::testing::Values(Case{1, 3, {50}}, Case{2, 7, {1, 0, 80}}, Case{2, 1, {5}},
                                           Case{3, 11, {300, 2}}, Case{5, 13, {400, 30}}, Case{5, 256, {200}},
                                           Case{4, 4, {1}}));

TEST(NgramModel, ContinuationCountsAreThoseOfTheBook) {
  // "San Francisco": a symbol (3) that follows one other only gets little where the context is new, however frequent.
  Ints text;
  for (int i = 0; i < 20; ++i) {
    for (const std::int32_t symbol : {2, 3}) text.push_back(symbol);
    text.push_back(i % 2 == 0 ? 4 : 5);
    text.push_back(1);
  }
  const Texts texts{text};
  const NgramModel model(spans_of(texts), {.order = 2, .vocab_size = 8});
  const Ints unseen{7};
  EXPECT_LT(model.probability(unseen, 3), model.probability(unseen, 1));
  const Ints after{2};
  EXPECT_GT(model.probability(after, 3), 0.9);
}

TEST(NgramModel, BitsAddUpAndSkipWhatIsGiven) {
  const Texts texts = skewed_texts(3, 9, {200});
  const NgramModel model(spans_of(texts), {.order = 3, .vocab_size = 9});
  double expected = 0;
  for (std::size_t i = 5; i < 200; ++i) {
    expected -= std::log2(model.probability(NgramModel::Symbols(texts[0]).first(i), texts[0][i]));
  }
  EXPECT_NEAR(model.bits(texts[0], 5), expected, 1e-9);
  EXPECT_EQ(model.bits(texts[0], 200), 0);
}

TEST(NgramModel, RefusesWhatItCantCount) {
  const Texts texts{{0, 1, 2}};
  const auto make = [&](int order, std::int64_t vocab) {
    return NgramModel(spans_of(texts), {.order = order, .vocab_size = vocab});
  };
  EXPECT_THROW(make(0, 3), std::invalid_argument);
  EXPECT_THROW(make(8, 256), std::invalid_argument);
  EXPECT_NO_THROW(make(7, 256));
  EXPECT_THROW(make(2, 2), std::invalid_argument);  // symbol 2
  EXPECT_THROW(make(2, 0), std::invalid_argument);
  EXPECT_THROW(NgramModel({}, {.order = 2, .vocab_size = 3}), std::invalid_argument);
  const NgramModel model = make(2, 3);
  EXPECT_THROW(model.probability({}, 3), std::invalid_argument);
  EXPECT_THROW(model.probability({}, -1), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
