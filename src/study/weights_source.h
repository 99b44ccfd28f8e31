// Where a block's weights and embeddings come from: a checkpoint where the model is a directory that has one, seeded
// values otherwise. Its input is the embedding of text: of the tokens of the tokenizer beside the checkpoint, of bytes
// where there is none.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "study/block_run.h"

namespace isomer {

class Checkpoint;
class Tokenizer;

struct WeightsSource {
  std::shared_ptr<const Checkpoint> checkpoint;  // null: seeded
  std::shared_ptr<const Tokenizer> tokenizer;    // null: bytes are tokens
  std::int64_t layer = 0;
  std::string description;  // for reports
};

/// `model` as given by the user: a built-in name or a path. Throws for a layer that the model does not have, and for a
/// tokenizer beside the checkpoint that can't be read or has more tokens than the model.
WeightsSource open_weights(const std::string& model, const ModelConfig& config, std::int64_t layer);

/// The first `count` tokens of `text`, starting over where it ends, under the source's tokenizer or as bytes;
/// `*wrapped` (if given) tells whether it did. A tokenizer reads U+FFFD where the text isn't UTF-8. Throws
/// std::invalid_argument if there is no token in the text and count is not 0.
std::vector<std::int64_t> text_tokens(const WeightsSource& source, const std::string& text, std::size_t count,
                                      bool* wrapped = nullptr);

/// Weights, embedded tokens of `text` (a checkpoint's rows, or seeded ones) and a seeded output gradient.
BlockData load_block_data(const BlockProblem& problem, const WeightsSource& source, const std::string& text,
                          std::uint64_t seed, bool shape_only);

}  // namespace isomer
