// Which tokenizer a subcommand reads text with: the model's own, or one that says the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/tokenizer.h"

namespace isomer {

/// The tokenizer in `directory` (a model's), or with `path` that one. Throws std::invalid_argument where there is none,
/// and for a `path` whose ids mean something else than those of the tokenizer in `directory`, if one lies there: the
/// model would read nonsense. `model` is the name that the user gave.
Tokenizer choose_tokenizer(const std::string& path, const std::string& model, const std::string& directory);

/// Bytes of text that each id stands for; none for special tokens.
std::vector<std::int32_t> bytes_of_tokens(const Tokenizer& tokenizer);

}  // namespace isomer
