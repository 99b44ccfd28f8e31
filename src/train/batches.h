// Which tokens a training step sees. Documents are packed end to end and cut into sequences of seq_len; sequence k
// reads tokens [k·seq_len, k·seq_len + seq_len], so that every token but the first is a target exactly once. Sample i
// of a run is a pure function of (tokens, options, i): neither ranks nor what was read before have a say in it.
#pragma once

#include <cstdint>
#include <vector>

#include "train/token_file.h"

namespace isomer {

struct BatchOptions {
  std::int64_t seq_len = 0;
  std::uint64_t seed = 0;
  /// Another permutation of the sequences each epoch; otherwise the order of the corpus.
  bool shuffle = true;
  /// Positions begin at 0 with each segment, rather than running through the sequence. RoPE sees only differences
  /// within a document, so that nothing but rounding depends on it.
  bool restart_positions = false;
  /// What is left behind the last whole sequence makes one more: id 0, target −1, a segment of its own. For evaluation.
  bool keep_tail = false;
};

/// All vectors [seq_len].
struct Sample {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> targets;    // the next token; −1 where there is none: at a document's end, in padding
  std::vector<std::int32_t> segments;   // 0, 1, … a document: tokens attend within their segment only
  std::vector<std::int32_t> positions;  // for RoPE
};

class BatchOrder {
 public:
  /// Throws std::invalid_argument if seq_len < 1 or the data has not one sequence.
  BatchOrder(TokenDataset dataset, const BatchOptions& options);

  std::int64_t num_sequences() const { return num_sequences_; }  // an epoch
  /// Sample `index` of the run, index ≥ 0; index / num_sequences() is the epoch.
  Sample sample(std::int64_t index) const;
  /// The sequence, in the order of the corpus, that sample `index` is.
  std::int64_t sequence_of(std::int64_t index) const;
  const BatchOptions& options() const { return options_; }
  const TokenDataset& dataset() const { return dataset_; }

 private:
  TokenDataset dataset_;
  BatchOptions options_;
  std::int64_t num_sequences_ = 0;
};

}  // namespace isomer
