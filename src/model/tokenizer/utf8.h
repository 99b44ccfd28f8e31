// UTF-8, strictly: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace isomer {

struct Utf8Character {
  char32_t point = 0;
  std::size_t length = 0;  // bytes; 0: `text` doesn't begin with a whole character
  std::size_t skip = 0;    // where length is 0: bytes of the longest part that could have become one, at least 1
};

/// The first character of `text`, which must not be empty.
Utf8Character first_character(std::string_view text);
void append_utf8(char32_t point, std::string& out);
/// Unicode's White_Space.
bool is_white_space(char32_t point);

}  // namespace isomer
