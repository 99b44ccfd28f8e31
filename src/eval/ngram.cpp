#include "eval/ngram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace isomer {

namespace {

/// Keeps every symbol possible after every context.
constexpr double kLeastDiscount = 0.05;

/// Chen and Goodman's estimates, none below kLeastDiscount; where a class of counts is empty, half a count for all.
std::array<double, 3> estimated_discounts(const std::vector<std::uint32_t>& counts) {
  std::array<double, 5> n{};  // n[c]: grams that occur c times
  for (const std::uint32_t count : counts) {
    if (count >= 1 && count <= 4) n[count] += 1;
  }
  if (n[1] == 0 || n[2] == 0 || n[3] == 0 || n[4] == 0) return {0.5, 0.5, 0.5};
  const double y = n[1] / (n[1] + 2 * n[2]);
  std::array<double, 3> discounts{};
  for (std::size_t c = 1; c <= 3; ++c) {
    const double of = static_cast<double>(c);
    discounts[c - 1] = std::clamp(of - (of + 1) * y * n[c + 1] / n[c], kLeastDiscount, of);
  }
  return discounts;
}

double discount_of(const std::array<double, 3>& discounts, std::uint32_t count) {
  return discounts[std::min<std::uint32_t>(count, 3) - 1];
}

}  // namespace

NgramModel::NgramModel(const std::vector<Symbols>& documents, const NgramOptions& options) : options_(options) {
  if (options_.vocab_size < 1 || options_.vocab_size > std::int64_t{1} << 31) {
    invalid_argument("vocab_size {}: an n-gram model takes 1 to 2^31 symbols", options_.vocab_size);
  }
  // The begin symbol is V.
  bits_per_symbol_ = std::bit_width(static_cast<std::uint64_t>(options_.vocab_size));
  const int most = 63 / bits_per_symbol_;
  if (options_.order < 1 || options_.order > most) {
    invalid_argument("order {}: 1 to {} with a vocabulary of {}", options_.order, most, options_.vocab_size);
  }
  std::vector<std::uint64_t> grams = highest_grams(documents);
  if (grams.empty()) invalid_argument("an n-gram model of no text; give some");
  levels_.resize(static_cast<std::size_t>(options_.order));
  count_level(options_.order, std::move(grams));
  for (int k = options_.order - 1; k >= 1; --k) {
    std::vector<std::uint64_t> shorter = level(k + 1).grams;
    for (std::uint64_t& gram : shorter) gram &= mask(k);
    count_level(k, std::move(shorter));
  }
}

std::uint64_t NgramModel::mask(int symbols) const {
  return (std::uint64_t{1} << (symbols * bits_per_symbol_)) - 1;  // order · bits ≤ 63
}

void NgramModel::check_symbol(std::int32_t symbol) const {
  if (symbol < 0 || symbol >= options_.vocab_size) {
    invalid_argument("symbol {}: the n-gram model's vocabulary has {}", symbol, options_.vocab_size);
  }
}

std::vector<std::uint64_t> NgramModel::highest_grams(const std::vector<Symbols>& documents) const {
  std::size_t count = 0;
  for (const Symbols document : documents) count += document.size();
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    invalid_argument("{} symbols of text: an n-gram model counts up to 2^32 − 1; give less", count);
  }
  std::vector<std::uint64_t> grams;
  grams.reserve(count);
  for (const Symbols document : documents) {
    std::uint64_t gram = 0;
    for (int i = 0; i < options_.order; ++i) {
      gram = gram << bits_per_symbol_ | static_cast<std::uint64_t>(options_.vocab_size);
    }
    for (const std::int32_t symbol : document) {
      check_symbol(symbol);
      gram = (gram << bits_per_symbol_ | static_cast<std::uint64_t>(symbol)) & mask(options_.order);
      grams.push_back(gram);
    }
  }
  return grams;
}

void NgramModel::count_level(int k, std::vector<std::uint64_t> grams) {
  Level& counted = levels_[static_cast<std::size_t>(k - 1)];
  std::sort(grams.begin(), grams.end());
  for (std::size_t begin = 0; begin < grams.size();) {
    std::size_t end = begin;
    while (end < grams.size() && grams[end] == grams[begin]) ++end;
    counted.counts.push_back(static_cast<std::uint32_t>(end - begin));
    grams[counted.counts.size() - 1] = grams[begin];
    begin = end;
  }
  grams.resize(counted.counts.size());
  grams.shrink_to_fit();
  counted.grams = std::move(grams);
  counted.discounts = estimated_discounts(counted.counts);
  finish_level(counted);
}

void NgramModel::finish_level(Level& counted) const {
  const auto size = static_cast<std::uint32_t>(counted.grams.size());
  for (std::uint32_t begin = 0; begin < size;) {
    Context context{.key = counted.grams[begin] >> bits_per_symbol_, .begin = begin, .end = begin};
    double freed = 0;
    while (context.end < size && counted.grams[context.end] >> bits_per_symbol_ == context.key) {
      const std::uint32_t count = counted.counts[context.end++];
      context.total += count;
      freed += discount_of(counted.discounts, count);
    }
    context.backoff_weight = freed / context.total;
    counted.contexts.push_back(context);
    begin = context.end;
  }
}

double NgramModel::probability(std::uint64_t gram) const {
  double p = 1.0 / static_cast<double>(options_.vocab_size);
  for (int k = 1; k <= options_.order; ++k) {
    const Level& counted = level(k);
    const std::uint64_t wanted = gram & mask(k), key = wanted >> bits_per_symbol_;
    const auto context = std::lower_bound(counted.contexts.begin(), counted.contexts.end(), key,
                                          [](const Context& c, std::uint64_t value) { return c.key < value; });
    if (context == counted.contexts.end() || context->key != key) return p;  // nor has a longer one been seen
    const auto begin = counted.grams.begin() + context->begin, end = counted.grams.begin() + context->end;
    const auto found = std::lower_bound(begin, end, wanted);
    double own = 0;
    if (found != end && *found == wanted) {
      const std::uint32_t count = counted.counts[static_cast<std::size_t>(found - counted.grams.begin())];
      own = (count - discount_of(counted.discounts, count)) / context->total;
    }
    p = own + context->backoff_weight * p;
  }
  return p;
}

double NgramModel::probability(Symbols before, std::int32_t symbol) const {
  check_symbol(symbol);
  const auto wanted = static_cast<std::size_t>(options_.order - 1);
  const std::size_t given = std::min(wanted, before.size());
  std::uint64_t gram = 0;
  for (std::size_t i = given; i < wanted; ++i) {
    gram = gram << bits_per_symbol_ | static_cast<std::uint64_t>(options_.vocab_size);
  }
  for (const std::int32_t earlier : before.last(given)) {
    check_symbol(earlier);
    gram = gram << bits_per_symbol_ | static_cast<std::uint64_t>(earlier);
  }
  return probability(gram << bits_per_symbol_ | static_cast<std::uint64_t>(symbol));
}

double NgramModel::bits(Symbols document, std::int64_t skip) const {
  double bits = 0;
  for (auto i = static_cast<std::size_t>(skip); i < document.size(); ++i) {
    bits -= std::log2(probability(document.first(i), document[i]));
  }
  return bits;
}

}  // namespace isomer
