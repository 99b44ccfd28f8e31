#include "model/tokenizer/pattern_translation.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"
#include "model/json_text.h"
#include "model/tokenizer/unicode_additions.h"

namespace isomer {

namespace {

constexpr std::string_view kSpace = R"(\t-\r\x{85}\p{Z})";  // White_Space; PCRE2's own \s has U+180E too
constexpr std::string_view kNoSpace =
    R"(\x{0}-\x{8}\x{e}-\x{1f}!-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
constexpr std::string_view kHexDigit = "0-9A-Fa-f";
constexpr std::array<std::string_view, 26> kCategories = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd",
                                                          "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
                                                          "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc"};

bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'A' && c <= 'F') || (c >= 'a' && c <= 'f'); }

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view field) : text_(pattern), field_(field) {}

  std::string run() {
    while (at_ < text_.size()) element();
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::size_t begin, std::string_view why) const {
    throw Error(fmt::format("{}: at byte {} of the pattern '{}': {}", field_, begin, printable(text_), why));
  }
  bool next_is(std::string_view what) const { return text_.substr(at_).starts_with(what); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void element() {
    switch (text_[at_]) {
      case '\\': escape(); break;
      case '[': char_class(); break;
      case '(': group(); break;
      case '{': interval(); break;
      case '*':
      case '+':
      case '?':
        out_ += text_[at_++];
        if (peek() == '?' || peek() == '+') out_ += text_[at_++];
        break;
      default: out_ += text_[at_++];
    }
  }

  void group() {
    const std::size_t begin = at_++;
    if (peek() == '*') refuse(begin, "'(*' is not supported");
    out_ += '(';
    if (peek() != '?') return;
    for (const std::string_view kind : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:", "?-i:"}) {
      if (!next_is(kind)) continue;
      out_ += kind;
      at_ += kind.size();
      return;
    }
    // Elsewhere Oniguruma lets it reach over the alternatives that follow, PCRE2 doesn't.
    if (begin != 0 || !next_is("?i)")) refuse(begin, "this kind of group is not supported");
    out_ += "?i)";
    at_ += 3;
  }

  /// {n}, {n,}, {n,m}, {,m}; anything else is the character itself.
  void interval() {
    const std::size_t begin = at_;
    const std::size_t end = text_.find('}', begin);
    const std::string_view inside = end == std::string_view::npos ? "" : text_.substr(begin + 1, end - begin - 1);
    const bool counts = std::all_of(inside.begin(), inside.end(), [](char c) { return is_digit(c) || c == ','; }) &&
                        std::count(inside.begin(), inside.end(), ',') <= 1 &&
                        std::any_of(inside.begin(), inside.end(), is_digit);
    if (!counts) {
      out_ += "\\{";
      ++at_;
      return;
    }
    out_ += fmt::format("{{{}{}}}", inside.front() == ',' ? "0" : "", inside);
    at_ = end + 1;
    if (peek() == '+') refuse(at_, "'+' after an interval is read differently by different engines");
    if (peek() != '?') return;
    if (inside.find(',') == std::string_view::npos) refuse(at_, "'{n}?' is read differently by different engines");
    out_ += text_[at_++];
  }

  /// Outside a class.
  void escape() {
    const char kind = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    std::string positive, negative;
    if (kind == 'b' || kind == 'B') {
      const std::string word = fmt::format("[{}]", word_class());
      out_ += kind == 'b' ? fmt::format("(?:(?<={0})(?!{0})|(?<!{0})(?={0}))", word)
                          : fmt::format("(?:(?<={0})(?={0})|(?<!{0})(?!{0}))", word);
      at_ += 2;
    } else if (kind == 'A' || kind == 'z' || kind == 'Z') {
      out_ += text_.substr(at_, 2);
      at_ += 2;
    } else if (class_escape(positive, negative)) {
      out_ += negative.empty() ? fmt::format("[{}]", positive) : fmt::format("[^{}]", negative);
    } else {
      out_ += literal_escape();
    }
  }

  static std::string word_class() {
    return fmt::format(R"(\p{{Alphabetic}}\p{{M}}\p{{Nd}}\p{{Pc}}{})", unicode_additions("\\w"));
  }

  /// \s, \p{…} and their like: what goes into a class that means it (positive) or the contrary (negative).
  bool class_escape(std::string& positive, std::string& negative) {
    const char kind = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    switch (kind) {
      case 's': positive = kSpace; break;
      case 'S':
        positive = kNoSpace;
        negative = kSpace;
        break;
      case 'd': positive = property("Nd", at_); break;
      case 'D': negative = property("Nd", at_); break;
      case 'w': positive = word_class(); break;
      case 'W': negative = word_class(); break;
      case 'h': positive = kHexDigit; break;
      case 'H': negative = kHexDigit; break;
      case 'p':
      case 'P': property_escape(kind == 'P', positive, negative); return true;
      default: return false;
    }
    at_ += 2;
    return true;
  }

  void property_escape(bool negated, std::string& positive, std::string& negative) {
    const std::size_t begin = at_;
    at_ += 2;
    if (peek() != '{') refuse(begin, "a property is written \\p{Name}");
    const std::size_t end = text_.find('}', at_);
    if (end == std::string_view::npos) refuse(begin, "a property without its '}'");
    std::string_view name = text_.substr(at_ + 1, end - at_ - 1);
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    at_ = end + 1;
    (negated ? negative : positive) = property(name, begin);
  }

  /// A general category, a group of them or a script, with what newer versions of Unicode added.
  std::string property(std::string_view name, std::size_t begin) const {
    std::string added;
    bool known = false;
    for (const std::string_view category : kCategories) {
      if (category == "Cc" ? name != "Cc" : name != category && name != category.substr(0, 1)) continue;
      known = true;
      added += unicode_additions(category);
    }
    if (known) return fmt::format("\\p{{{}}}{}", name, added);
    for (const std::string_view script :
         {"Arabic", "Armenian", "Bengali", "Cyrillic", "Devanagari", "Georgian", "Greek", "Han", "Hangul", "Hebrew",
          "Hiragana", "Katakana", "Latin", "Tamil", "Thai", "Tibetan"}) {
      // Without "sc:", PCRE2 takes the script's extensions too.
      if (name == script) return fmt::format("\\p{{sc:{}}}{}", name, unicode_additions(script));
    }
    refuse(begin, fmt::format("the property '{}' is not supported", printable(name)));
  }

  /// A character written with a backslash, as PCRE2 writes it.
  std::string literal_escape() {
    const std::size_t begin = at_++;
    if (at_ == text_.size()) refuse(begin, "a backslash at the end");
    const char kind = text_[at_++];
    switch (kind) {
      case 't': return "\\t";
      case 'n': return "\\n";
      case 'r': return "\\r";
      case 'f': return "\\f";
      case 'a': return "\\x{7}";
      case 'e': return "\\x{1b}";
      case 'v': return "\\x{b}";
      case 'x':
        if (peek() == '{') {
          const std::size_t end = text_.find('}', at_);
          if (end == std::string_view::npos) refuse(begin, "'\\x{' without its '}'");
          const std::string_view digits = text_.substr(at_ + 1, end - at_ - 1);
          at_ = end + 1;
          return code_point(digits, begin, 0x10ffff);
        }
        return code_point(digits_of(2), begin, 0x7f);
      case 'u': return code_point(digits_of(4), begin, 0xffff);
      default: break;
    }
    if (is_letter(kind) || is_digit(kind)) refuse(begin, fmt::format("'\\{}' is not supported", kind));
    const bool ascii = static_cast<unsigned char>(kind) < 0x80;
    return ascii ? fmt::format("\\{}", kind) : std::string(1, kind);
  }

  std::string_view digits_of(std::size_t count) {
    const std::string_view digits = text_.substr(at_, count);
    at_ += digits.size();
    return digits;
  }

  std::string code_point(std::string_view digits, std::size_t begin, unsigned highest) const {
    unsigned value = 0;
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (code != std::errc() || end != digits.data() + digits.size() || digits.empty() || value > highest ||
        (value >= 0xd800 && value <= 0xdfff) || !std::all_of(digits.begin(), digits.end(), is_hex)) {
      refuse(begin, fmt::format("'{}' is no character up to {:x}", printable(digits), highest));
    }
    return fmt::format("\\x{{{:x}}}", value);
  }

  void char_class() {
    const std::size_t begin = at_++;
    out_ += '[';
    if (peek() == '^') out_ += text_[at_++];
    if (peek() == ']') refuse(begin, "a class that begins with ']'");
    bool first = true;
    while (peek() != ']' || at_ >= text_.size()) {
      if (at_ >= text_.size()) refuse(begin, "a class without its ']'");
      class_item(first);
      first = false;
    }
    out_ += text_[at_++];
  }

  void class_item(bool first) {
    const std::size_t begin = at_;
    std::string positive, negative;
    if (peek() == '[') refuse(begin, "a class within a class is not supported; write '\\[' for the character");
    if (next_is("&&")) refuse(begin, "the intersection of classes is not supported");
    if (peek() != '\\') {
      const bool range = peek() == '-' && !first;
      out_ += text_[at_++];
      // "a-\s": what follows the hyphen must be one character, or the end.
      if (range && peek() == '\\' && class_escape(positive, negative)) refuse(begin, "a range that ends in a class");
    } else if (class_escape(positive, negative)) {
      if (positive.empty()) refuse(begin, "a negated property or class inside a class is not supported");
      out_ += positive;
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']')
        refuse(at_, "a range that begins in a class");
    } else {
      out_ += literal_escape();
    }
  }

  std::string_view text_, field_;
  std::size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string translate_pattern(std::string_view pattern, std::string_view field) {
  return Translator(pattern, field).run();
}

}  // namespace isomer
