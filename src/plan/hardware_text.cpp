// Hardware files for people: one figure a line, long lists of numbers wrapped.
#include <nlohmann/json.hpp>

#include "plan/hardware_json.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr std::size_t kWidth = 120;

bool is_flat(const json& value) {
  if (!value.is_structured()) return true;
  return std::all_of(value.begin(), value.end(), [](const json& item) { return !item.is_structured(); });
}

/// Numbers of a list, as many a line as fit.
std::string wrapped_list(const json& value, std::size_t indent) {
  const std::string margin(indent + 2, ' ');
  std::string text = "[\n" + margin;
  std::size_t column = margin.size();
  for (std::size_t i = 0; i < value.size(); ++i) {
    const std::string item = value[i].dump() + (i + 1 < value.size() ? "," : "");
    if (column + item.size() + 1 > kWidth) {
      text += "\n" + margin;
      column = margin.size();
    } else if (i > 0) {
      text += " ";
    }
    text += item;
    column += item.size() + 1;
  }
  return text + "\n" + std::string(indent, ' ') + "]";
}

std::vector<std::string> key_order(const json& object) {
  static const std::vector<std::string> kFirst = {"schema_version", "name",  "description", "memory",
                                                  "flops_per_s",    "links", "figures",     "operation"};
  static const std::vector<std::string> kLast = {"used", "held_back", "surfaces", "fit", "curves"};
  std::vector<std::string> keys;
  const auto listed = [](const std::vector<std::string>& names, const std::string& key) {
    return std::find(names.begin(), names.end(), key) != names.end();
  };
  for (const auto& key : kFirst)
    if (object.contains(key)) keys.push_back(key);
  for (const auto& item : object.items())
    if (!listed(kFirst, item.key()) && !listed(kLast, item.key())) keys.push_back(item.key());
  for (const auto& key : kLast)
    if (object.contains(key)) keys.push_back(key);
  return keys;
}

std::string flat_text(const json& value) {
  if (!value.is_object()) return value.dump();
  std::string text;
  for (const auto& key : key_order(value)) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", json(key).dump(), value[key].dump());
  }
  return "{" + text + "}";
}

std::string text_of(const json& value, std::size_t indent) {
  if (is_flat(value)) {
    const std::string flat = flat_text(value);
    if (indent > 0 && indent + flat.size() <= kWidth - 20) return flat;
    if (value.is_array()) return wrapped_list(value, indent);
    if (!value.is_object()) return flat;
  }
  const std::string margin(indent + 2, ' ');
  std::string text;
  const auto add = [&](const std::string& line) {
    text += fmt::format("{}\n{}{}", text.empty() ? "" : ",", margin, line);
  };
  if (value.is_array()) {
    for (const json& item : value) add(text_of(item, indent + 2));
    return "[" + text + "\n" + std::string(indent, ' ') + "]";
  }
  for (const auto& key : key_order(value)) add(json(key).dump() + ": " + text_of(value[key], indent + 2));
  return "{" + text + "\n" + std::string(indent, ' ') + "}";
}

}  // namespace

std::string hardware_text(const json& value) { return text_of(value, 0) + "\n"; }

}  // namespace isomer
