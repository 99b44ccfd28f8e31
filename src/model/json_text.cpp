#include "model/json_text.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"

namespace isomer {

namespace {

using nlohmann::json;

/// Walks the text and lets others see how far it has come: the parser itself tells offsets of syntax errors only.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    *furthest_ = at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

/// Builds the document; refuses duplicate keys and deep nesting, which the library's own builder lets pass.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  explicit StrictBuilder(json& root) : root_(root) {}

  bool null() override { return put(json(nullptr)); }
  bool boolean(bool value) override { return put(json(value)); }
  bool number_integer(number_integer_t value) override { return put(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return put(json(value)); }
  bool string(string_t& value) override { return put(json(std::move(value))); }
  bool binary(binary_t&) override { return fail("binary data"); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) return fail(fmt::format("duplicate key \"{}\"", printable(name)));
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view what = error.what();
    const auto colon = what.rfind("syntax error");
    return fail(std::string(colon == std::string_view::npos ? what : what.substr(colon)));
  }

  const std::string& problem() const { return problem_; }

 private:
  json* place(json&& value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  bool put(json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(json&& container) {
    if (stack_.size() >= kMaxJsonDepth) return fail(fmt::format("nested more than {} deep", kMaxJsonDepth));
    stack_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }
  bool fail(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    return false;
  }

  json& root_;
  std::vector<json*> stack_;
  std::string key_;
  std::string problem_;
};

/// Length of the UTF-8 sequence at the start of `text`, 0 if it isn't valid.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t length = byte(0) < 0x80   ? 1
                             : byte(0) < 0xc2 ? 0
                             : byte(0) < 0xe0 ? 2
                             : byte(0) < 0xf0 ? 3
                             : byte(0) < 0xf5 ? 4
                                              : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

}  // namespace

json parse_json(std::string_view text, std::string_view source, std::int64_t base_offset) {
  json root;
  StrictBuilder builder(root);
  const char* furthest = text.data();
  const char* end = text.data() + text.size();
  const bool ok = json::sax_parse(CountingIterator(text.data(), &furthest), CountingIterator(end, &furthest), &builder);
  if (!ok) {
    throw Error(fmt::format("{}: at byte {}: {}", source, base_offset + (furthest - text.data()),
                            builder.problem().empty() ? "not valid JSON" : printable(builder.problem(), 240)));
  }
  return root;
}

std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes) {
  std::error_code code;
  if (!std::filesystem::is_regular_file(path, code)) throw Error(fmt::format("{}: not a file", path.string()));
  const auto size = std::filesystem::file_size(path, code);
  if (code) throw Error(fmt::format("{}: {}", path.string(), code.message()));
  if (size > static_cast<std::uintmax_t>(max_bytes)) {
    throw Error(fmt::format("{}: {} bytes, expected at most {}", path.string(), size, max_bytes));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  if (!file) throw Error(fmt::format("{}: could not be read", path.string()));
  return text;
}

std::string brief(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_string()) return fmt::format("\"{}\"", printable(value.get_ref<const std::string&>()));
  return value.dump();
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  while (!text.empty() && out.size() < limit) {
    const auto length = utf8_length(text);
    const auto byte = static_cast<unsigned char>(text[0]);
    // U+0080 to U+009F are control characters too, which terminals may obey.
    const bool high_control = length == 2 && byte == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    if (length == 0 || byte < 0x20 || byte == 0x7f || high_control) {
      const std::size_t count = high_control ? 2 : 1;
      for (std::size_t i = 0; i < count; ++i) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
      text.remove_prefix(count);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return text.empty() ? out : out + "…";
}

}  // namespace isomer
