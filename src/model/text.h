// Text as tokens, one a byte: what training and comparisons read where no tokenizer is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace isomer {

/// The novel under data/text/, carried by the executable.
std::string_view default_text();

/// The bytes of a file. Throws isomer::Error, naming the path, if it is missing, empty, unreadable or no regular file.
std::string load_text_bytes(const std::string& path);

/// The first `count` bytes of `text` as token ids 0 … 255, starting over where the text ends; `*wrapped` (if given)
/// tells whether it did. Throws std::invalid_argument if `text` is empty and `count` is not 0.
std::vector<std::int64_t> byte_tokens(std::string_view text, std::size_t count, bool* wrapped = nullptr);

}  // namespace isomer
