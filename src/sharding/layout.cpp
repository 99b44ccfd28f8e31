#include "sharding/layout.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace isomer {

namespace {

constexpr int kMaxAxisSize = 1 << 20;

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const auto at = text.find(separator);
    parts.push_back(trimmed(text.substr(0, at)));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

bool is_word(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  });
}

int parse_size(std::string_view whole, std::string_view text) {
  int size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  if (error != std::errc() || end != text.data() + text.size() || size < 1 || size > kMaxAxisSize) {
    invalid_argument("layout '{}': '{}' is neither a number of ranks (1 to {}) nor key=value", whole, text,
                     kMaxAxisSize);
  }
  return size;
}

void parse_setting(std::string_view whole, std::string_view text, LayoutAxis& axis) {
  const auto equals = text.find('=');
  if (equals == std::string_view::npos) {
    axis.size = parse_size(whole, text);
    return;
  }
  const auto key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
  if (!is_word(key) || !is_word(value)) invalid_argument("layout '{}': '{}' is not key=value", whole, text);
  if (!axis.options.emplace(key, value).second) invalid_argument("layout '{}': '{}' is given twice", whole, key);
}

}  // namespace

std::string Layout::option(std::string_view key, std::string_view fallback) const {
  for (const LayoutAxis& axis : axes) {
    const auto found = axis.options.find(std::string(key));
    if (found != axis.options.end()) return found->second;
  }
  return std::string(fallback);
}

Layout parse_layout(std::string_view text, std::string_view example) {
  Layout layout;
  for (std::string_view part : split(text, ',')) {
    const auto colon = part.find(':');
    const auto name = trimmed(part.substr(0, colon));
    if (colon == std::string_view::npos && part.find('=') != std::string_view::npos) {
      if (layout.axes.empty())
        invalid_argument("layout '{}': '{}' stands before any axis it could belong to", text, part);
      parse_setting(text, part, layout.axes.back());
      continue;
    }
    if (!is_word(name)) {
      invalid_argument("layout '{}': expected a name and its sizes, such as {}, got '{}'", text, example, part);
    }
    layout.axes.push_back({.name = std::string(name)});
    if (colon != std::string_view::npos) parse_setting(text, trimmed(part.substr(colon + 1)), layout.axes.back());
  }
  return layout;
}

std::vector<Layout> parse_layouts(std::string_view text) {
  std::vector<Layout> layouts;
  for (std::string_view part : split(text, ';')) layouts.push_back(parse_layout(part));
  return layouts;
}

std::string without_blanks(std::string_view text) {
  std::string result(text);
  std::erase_if(result, [](char c) { return c == ' ' || c == '\t'; });
  return result;
}

std::string to_string(const Layout& layout) {
  std::string text;
  for (const LayoutAxis& axis : layout.axes) {
    if (!text.empty()) text += ',';
    text += axis.name;
    char separator = ':';
    if (axis.size > 0) {
      text += fmt::format(":{}", axis.size);
      separator = ',';
    }
    for (const auto& [key, value] : axis.options) {
      text += fmt::format("{}{}={}", separator, key, value);
      separator = ',';
    }
  }
  return text;
}

}  // namespace isomer
