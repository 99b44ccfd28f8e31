// A compiled regular expression (PCRE2, Unicode 14 with what the reference knows beyond it).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace isomer {

struct PatternMatch {
  std::size_t begin = 0, end = 0;
};

/// What a search writes to; one a thread. Made by the first search.
class PatternScratch {
 public:
  PatternScratch();
  ~PatternScratch();
  PatternScratch(const PatternScratch&) = delete;
  PatternScratch& operator=(const PatternScratch&) = delete;

 private:
  friend class Pattern;
  void* match_data_;
  void* match_context_;
};

/// Immutable; shared by threads, each with a scratch of its own.
class Pattern {
 public:
  enum class Kind { regex, literal };
  /// Compiles an Oniguruma pattern, or text taken literally. Throws isomer::Error beginning with `field`.
  Pattern(std::string_view pattern, Kind kind, std::string_view field);

  /// The first match that begins at `from` or later; looking behind sees all of `text`, which must be valid UTF-8.
  /// Throws isomer::Error where a match needs more than ten million steps and 16 for each byte.
  std::optional<PatternMatch> find(std::string_view text, std::size_t from, PatternScratch& scratch) const;

 private:
  std::shared_ptr<const void> code_;
  std::string source_;  // for errors
};

/// All matches in `text` as the reference's search gives them: from left to right, an empty one never right behind the
/// one before. Calls found(match).
template <class Found>
void for_each_match(const Pattern& pattern, std::string_view text, PatternScratch& scratch, Found&& found) {
  std::size_t from = 0;
  std::optional<std::size_t> last_end;
  while (from <= text.size()) {
    const auto match = pattern.find(text, from, scratch);
    if (!match) return;
    if (match->begin == match->end && last_end == match->end) {
      do ++from;
      while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80);
      continue;
    }
    from = match->end;
    last_end = match->end;
    found(*match);
  }
}

}  // namespace isomer
