// Which pairs to merge, from counted pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace isomer {

/// A piece as tokens, and how often it occurs.
struct CountedPiece {
  std::vector<std::int32_t> tokens;
  std::int64_t count = 0;
};

/// Merges the most frequent pair, of equals the one with the lower ids, again and again. Counts are kept up to date
/// from the pieces that a merge changes; the queue's stale entries are put back with their present count when they come
/// up.
class MergeLearner {
 public:
  MergeLearner(std::vector<CountedPiece> pieces, std::int64_t min_count);

  using Pair = std::pair<std::int32_t, std::int32_t>;
  /// The pair to merge now; false if none occurs min_count times.
  bool next(Pair& pair);
  /// Makes `pair` the token `id` wherever it stands.
  void merge(Pair pair, std::int32_t id);

 private:
  struct Candidate {
    std::int64_t count;
    Pair pair;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };
  struct PairState {
    std::int64_t count = 0;
    std::vector<std::uint32_t> pieces;  // where it stands or once stood, with repetitions
  };
  static std::uint64_t key_of(Pair pair) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(pair.first)) << 32 |
           static_cast<std::uint32_t>(pair.second);
  }
  void add(Pair pair, std::int64_t count, std::uint32_t piece);
  void remove(Pair pair, std::int64_t count) { pairs_[key_of(pair)].count -= count; }
  void merge_in_piece(Pair pair, std::int32_t id, std::uint32_t index, std::vector<Pair>& grown);

  std::vector<CountedPiece> pieces_;
  std::int64_t min_count_;
  std::unordered_map<std::uint64_t, PairState> pairs_;
  std::priority_queue<Candidate> queue_;
};

}  // namespace isomer
