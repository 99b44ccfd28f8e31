// Which rows of a window a decode path computes, and which of them count (model-math: three ways to score, always
// named):
//
//   prefill         every row by exact prefill; no error of decode can show
//   every-position  every row as decode computes it, from the first token on
//   decode          the first `overlap` tokens of a window by exact prefill, the others token by token as decode does
//
// In all three a window scores what its rows from `overlap` on predict, the first window too, so that they score the
// same targets. Windows are those of WindowOrder; each document in one is a sequence of its own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/rank_context.h"
#include "eval/perplexity.h"

namespace isomer {

enum class ScoreMode : std::uint8_t { prefill, every_position, decode };
std::string_view name_of(ScoreMode mode);
/// The inverse. Throws std::invalid_argument listing the names.
ScoreMode parse_score_mode(std::string_view text);

/// Consecutive tokens of one document, at positions 0, 1, ….
struct ScoredSequence {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> targets;  // [ids]; −1: not scored
  std::int64_t exact_rows = 0;        // leading rows that exact prefill computes
};

/// The sequences of window j that score anything.
std::vector<ScoredSequence> scored_sequences(const WindowOrder& windows, std::int64_t j, ScoreMode mode);

/// A model under a way of computing: what rank's code asks for logits.
class LogitSource {
 public:
  virtual ~LogitSource() = default;
  /// Logits [Σ ids, V], float32 or float64, of all rows in the order of sequences. Collective over the ranks.
  virtual Tensor logits(RankContext& ctx, std::span<const ScoredSequence> sequences) = 0;
};

}  // namespace isomer
