#include "model/tokenizer/merge_learner.h"

#include <algorithm>

namespace isomer {

MergeLearner::MergeLearner(std::vector<CountedPiece> pieces, std::int64_t min_count)
    : pieces_(std::move(pieces)), min_count_(std::max<std::int64_t>(1, min_count)) {
  for (std::uint32_t index = 0; index < pieces_.size(); ++index) {
    const CountedPiece& piece = pieces_[index];
    for (std::size_t i = 0; i + 1 < piece.tokens.size(); ++i) {
      add({piece.tokens[i], piece.tokens[i + 1]}, piece.count, index);
    }
  }
  for (const auto& [key, state] : pairs_) {
    queue_.push({state.count, {static_cast<std::int32_t>(key >> 32), static_cast<std::int32_t>(key & 0xffffffff)}});
  }
}

void MergeLearner::add(Pair pair, std::int64_t count, std::uint32_t piece) {
  PairState& state = pairs_[key_of(pair)];
  state.count += count;
  if (state.pieces.empty() || state.pieces.back() != piece) state.pieces.push_back(piece);
}

bool MergeLearner::next(Pair& pair) {
  while (!queue_.empty()) {
    const Candidate top = queue_.top();
    queue_.pop();
    const std::int64_t count = pairs_[key_of(top.pair)].count;
    if (count < min_count_) continue;
    if (count != top.count) {
      queue_.push({count, top.pair});
      continue;
    }
    pair = top.pair;
    return true;
  }
  return false;
}

void MergeLearner::merge_in_piece(Pair pair, std::int32_t id, std::uint32_t index, std::vector<Pair>& grown) {
  CountedPiece& piece = pieces_[index];
  auto& tokens = piece.tokens;
  std::size_t out = 0;
  for (std::size_t in = 0; in < tokens.size(); ++in, ++out) {
    if (in + 1 >= tokens.size() || tokens[in] != pair.first || tokens[in + 1] != pair.second) {
      tokens[out] = tokens[in];
      continue;
    }
    // What stands to the left has been merged already, what stands to the right has not.
    if (out > 0) {
      remove({tokens[out - 1], pair.first}, piece.count);
      add({tokens[out - 1], id}, piece.count, index);
      grown.emplace_back(tokens[out - 1], id);
    }
    if (in + 2 < tokens.size()) {
      remove({pair.second, tokens[in + 2]}, piece.count);
      add({id, tokens[in + 2]}, piece.count, index);
      grown.emplace_back(id, tokens[in + 2]);
    }
    tokens[out] = id;
    ++in;
  }
  tokens.resize(out);
}

void MergeLearner::merge(Pair pair, std::int32_t id) {
  PairState& state = pairs_[key_of(pair)];
  std::vector<std::uint32_t> where = std::move(state.pieces);
  state = {};
  std::sort(where.begin(), where.end());
  where.erase(std::unique(where.begin(), where.end()), where.end());
  std::vector<Pair> grown;
  for (const std::uint32_t index : where) merge_in_piece(pair, id, index, grown);
  // Neighbours of the same kind ("aaaa") count the pair itself down once more; all of it is gone now.
  pairs_[key_of(pair)].count = 0;
  std::sort(grown.begin(), grown.end());
  grown.erase(std::unique(grown.begin(), grown.end()), grown.end());
  for (const Pair& next : grown) {
    const std::int64_t count = pairs_[key_of(next)].count;
    if (count >= min_count_) queue_.push({count, next});
  }
}

}  // namespace isomer
