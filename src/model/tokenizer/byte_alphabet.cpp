#include "model/tokenizer/byte_alphabet.h"

#include "model/tokenizer/utf8.h"

namespace isomer {

namespace {

constexpr char32_t kLastCharacter = 0x143;  // 256 + 68 bytes that aren't visible − 1

bool is_visible(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/// Character → byte, −1 where there is none.
const std::array<int, kLastCharacter + 1>& character_bytes() {
  static const auto kTable = [] {
    std::array<int, kLastCharacter + 1> table;
    table.fill(-1);
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) table[is_visible(byte) ? byte : next++] = static_cast<int>(byte);
    return table;
  }();
  return kTable;
}

}  // namespace

const std::array<std::string, 256>& byte_characters() {
  static const auto kTable = [] {
    std::array<std::string, 256> table;
    for (char32_t point = 0; point <= kLastCharacter; ++point) {
      const int byte = character_bytes()[point];
      if (byte >= 0) append_utf8(point, table[static_cast<std::size_t>(byte)]);
    }
    return table;
  }();
  return kTable;
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8Character character = first_character(token);
    if (character.length == 0 || character.point > kLastCharacter) return std::nullopt;
    const int byte = character_bytes()[character.point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    token.remove_prefix(character.length);
  }
  return bytes;
}

std::string token_of_bytes(std::string_view bytes) {
  std::string token;
  for (const char byte : bytes) token += byte_characters()[static_cast<unsigned char>(byte)];
  return token;
}

}  // namespace isomer
