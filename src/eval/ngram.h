// Interpolated Kneser–Ney n-gram models over bytes or token ids: the baselines that a language model must beat.
//
//   p_k(w|h) = (c_k(hw) − D_k(c_k(hw)))⁺ / c_k(h·) + γ_k(h) · p_{k−1}(w|h')        h' is h without its first symbol
//
// down to p_0 = 1/V. c_n counts occurrences; below the highest order c_k(g) counts the different symbols that precede g
// (Kneser and Ney 1995). Each order has the three discounts of modified Kneser–Ney, D(1), D(2), D(3+), estimated from
// its own counts of counts (Chen and Goodman 1999, eq. 26), none below 0.05, and 0.5 each where one of the first four
// counts of counts is 0; γ_k(h) is the mass that they free. A context never seen leaves p_k = p_{k−1}. Documents are
// apart: before a document's first symbol stand n − 1 begin symbols, which are never predicted.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace isomer {

struct NgramOptions {
  int order = 5;                // n: a symbol is predicted from the n − 1 before it
  std::int64_t vocab_size = 0;  // V; symbols are 0 … V − 1
};

class NgramModel {
 public:
  using Symbols = std::span<const std::int32_t>;

  /// Counts n-grams of `documents`. Takes 8 bytes a symbol and about 40 a different gram. Throws std::invalid_argument
  /// for an order or vocabulary that 64 bits don't hold, a symbol outside the vocabulary, and for no text at all.
  NgramModel(const std::vector<Symbols>& documents, const NgramOptions& options);

  const NgramOptions& options() const { return options_; }
  /// Different k-grams, k in [1, n], those with begin symbols among them.
  std::int64_t num_grams(int k) const { return static_cast<std::int64_t>(level(k).grams.size()); }
  /// D(1), D(2), D(3+) of order k in [1, n].
  const std::array<double, 3>& discounts(int k) const { return level(k).discounts; }

  /// p(symbol | the symbols before it in its document); of `before` the last n − 1 matter. Never 0; over
  /// all symbols it sums to 1. Throws std::invalid_argument for symbols outside the vocabulary.
  double probability(Symbols before, std::int32_t symbol) const;

  /// Σ −log2 p over a document, the first `skip` symbols given rather than scored.
  double bits(Symbols document, std::int64_t skip = 0) const;

 private:
  /// A context of k − 1 symbols: its k-grams are grams[begin, end).
  struct Context {
    std::uint64_t key;
    std::uint32_t begin, end;
    double total = 0;           // c(h·)
    double backoff_weight = 0;  // γ(h)
  };
  struct Level {
    std::vector<std::uint64_t> grams;   // sorted; the first symbol in the highest bits
    std::vector<std::uint32_t> counts;  // c_k
    std::vector<Context> contexts;      // sorted by key
    std::array<double, 3> discounts{};
  };
  const Level& level(int k) const { return levels_[static_cast<std::size_t>(k - 1)]; }
  std::uint64_t mask(int symbols) const;
  std::vector<std::uint64_t> highest_grams(const std::vector<Symbols>& documents) const;
  void count_level(int k, std::vector<std::uint64_t> grams);
  void finish_level(Level& level) const;
  /// p of the gram's last symbol given the n − 1 before it, packed.
  double probability(std::uint64_t gram) const;
  void check_symbol(std::int32_t symbol) const;

  NgramOptions options_;
  int bits_per_symbol_ = 0;
  std::vector<Level> levels_;  // [n]
};

}  // namespace isomer
