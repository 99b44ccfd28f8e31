#include "model/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

#include "model/tokenizer.h"

namespace isomer {

Utf8Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return {first, 1, 0};
  const std::size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (length == 0) return {0, 0, 1};
  // The second byte's range rules out overlong forms, surrogates and what lies above U+10FFFF.
  const unsigned lowest = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned highest = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  char32_t point = first & (0x7f >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i >= text.size() || byte(i) < (i == 1 ? lowest : 0x80) || byte(i) > (i == 1 ? highest : 0xbf)) return {0, 0, i};
    point = point << 6 | (byte(i) & 0x3f);
  }
  return {point, length, 0};
}

void append_utf8(char32_t point, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xc0 | point >> 6);
    put(0x80 | (point & 0x3f));
  } else if (point < 0x10000) {
    put(0xe0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3f));
    put(0x80 | (point & 0x3f));
  } else {
    put(0xf0 | point >> 18);
    put(0x80 | (point >> 12 & 0x3f));
    put(0x80 | (point >> 6 & 0x3f));
    put(0x80 | (point & 0x3f));
  }
}

bool is_white_space(char32_t point) {
  return (point >= 0x9 && point <= 0xd) || point == 0x20 || point == 0x85 || point == 0xa0 || point == 0x1680 ||
         (point >= 0x2000 && point <= 0x200a) || point == 0x2028 || point == 0x2029 || point == 0x202f ||
         point == 0x205f || point == 0x3000;
}

std::optional<std::size_t> invalid_utf8_at(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    std::uint64_t eight = 0;
    if (text.size() - at >= 8) {  // most text is ASCII most of the time
      std::memcpy(&eight, text.data() + at, 8);
      if ((eight & 0x8080808080808080) == 0) {
        at += 8;
        continue;
      }
    }
    const Utf8Character character = first_character(text.substr(at));
    if (character.length == 0) return at;
    at += character.length;
  }
  return std::nullopt;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  while (const auto invalid = invalid_utf8_at(text)) {
    out += text.substr(0, *invalid);
    out += "\xef\xbf\xbd";
    text.remove_prefix(*invalid + first_character(text.substr(*invalid)).skip);
  }
  return out += text;
}

}  // namespace isomer
