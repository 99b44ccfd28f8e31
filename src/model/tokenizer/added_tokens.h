// Tokens that are found in the text itself, before it is cut into pieces: <|endoftext|> and its like.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/pattern.h"

namespace isomer {

/// As tokenizer.json has them. Without a normaliser `normalized` matters only in that such tokens are looked for after
/// all others.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
};

/// Finds a set of tokens in a text: from left to right, at each place the longest.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);
  bool empty() const { return tokens_.empty(); }

  /// Parts of the text in order: id and its text for a token (with the white space that lstrip and rstrip take), no id
  /// for what lies between. Calls found(text, id). Nothing for an empty text.
  using Found = std::function<void(std::string_view, std::optional<std::int32_t>)>;
  void split(std::string_view text, PatternScratch& scratch, const Found& found) const;

 private:
  const AddedToken* longest_at(std::string_view text) const;
  bool stands_alone(std::string_view text, std::size_t begin, std::size_t end, PatternScratch& scratch) const;

  std::vector<AddedToken> tokens_;  // by content
  std::array<bool, 256> begins_{};  // whether a token begins with this byte
  std::optional<Pattern> word_;     // a word's character
};

}  // namespace isomer
