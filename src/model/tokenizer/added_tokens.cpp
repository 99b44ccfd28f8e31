#include "model/tokenizer/added_tokens.h"

#include <algorithm>

#include "model/tokenizer/utf8.h"

namespace isomer {

namespace {

std::size_t begin_of_last_character(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

std::size_t begin_of_trailing_space(std::string_view text) {
  while (!text.empty()) {
    const std::size_t last = begin_of_last_character(text);
    if (!is_white_space(first_character(text.substr(last)).point)) break;
    text = text.substr(0, last);
  }
  return text.size();
}

std::size_t size_of_leading_space(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Character character = first_character(text.substr(at));
    if (!is_white_space(character.point)) break;
    at += character.length;
  }
  return at;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) begins_[static_cast<unsigned char>(token.content.front())] = true;
  const bool words = std::any_of(tokens_.begin(), tokens_.end(), [](const auto& t) { return t.single_word; });
  // \w as Rust's regex has it, which the reference uses here: Oniguruma's but for six numbers of Latin-1, and the
  // joiners.
  if (words) {
    word_.emplace(R"((?![\x{b2}\x{b3}\x{b9}\x{bc}-\x{be}])[\w\x{200c}\x{200d}])", Pattern::Kind::regex,
                  "added_tokens: single_word");
  }
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view text) const {
  // The tokens that share the text's first `depth` bytes are a range, which each byte narrows.
  auto low = tokens_.begin(), high = tokens_.end();
  const AddedToken* longest = nullptr;
  for (std::size_t depth = 0; low != high; ++depth) {
    if (low->content.size() == depth) {
      longest = &*low++;
      if (low == high) break;
    }
    if (depth == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[depth]);
    const auto byte_of = [depth](const AddedToken& token) { return static_cast<unsigned char>(token.content[depth]); };
    low = std::partition_point(low, high, [&](const AddedToken& token) { return byte_of(token) < byte; });
    high = std::partition_point(low, high, [&](const AddedToken& token) { return byte_of(token) <= byte; });
  }
  return longest;
}

bool AddedTokenFinder::stands_alone(std::string_view text, std::size_t begin, std::size_t end,
                                    PatternScratch& scratch) const {
  const auto is_word = [&](std::size_t at) {
    const auto match = word_->find(text.substr(at, first_character(text.substr(at)).length), 0, scratch);
    return match.has_value();
  };
  if (begin > 0 && is_word(begin_of_last_character(text.substr(0, begin)))) return false;
  return end == text.size() || !is_word(end);
}

void AddedTokenFinder::split(std::string_view text, PatternScratch& scratch, const Found& found) const {
  std::size_t done = 0, at = 0;
  while (at < text.size()) {
    const AddedToken* token = begins_[static_cast<unsigned char>(text[at])] ? longest_at(text.substr(at)) : nullptr;
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + token->content.size();
    at = end;
    if (token->single_word && !stands_alone(text, begin, end, scratch)) continue;
    if (token->lstrip) begin = std::max(begin_of_trailing_space(text.substr(0, begin)), done);
    if (token->rstrip) end += size_of_leading_space(text.substr(end));
    if (begin > done) found(text.substr(done, begin - done), std::nullopt);
    found(text.substr(begin, end - begin), token->id);
    done = end;
  }
  if (done < text.size()) found(text.substr(done), std::nullopt);
}

}  // namespace isomer
