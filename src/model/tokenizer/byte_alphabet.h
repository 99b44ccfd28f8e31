// GPT-2's alphabet: each byte as a visible character, so that a vocabulary can be written as text.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace isomer {

/// Byte → its character, in UTF-8.
const std::array<std::string, 256>& byte_characters();
/// The bytes behind a token of the vocabulary; nullopt if a character in it stands for no byte.
std::optional<std::string> bytes_of_token(std::string_view token);
std::string token_of_bytes(std::string_view bytes);

}  // namespace isomer
