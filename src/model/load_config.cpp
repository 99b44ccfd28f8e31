// Finding a configuration: by built-in name, directory or file.
#include <fmt/ranges.h>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.h"
#include "model/builtin_models.h"
#include "model/config.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxConfigBytes = 16 << 20;

/// Levenshtein distance.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

/// Names at most a third of their letters away, or that begin like the wanted one; nearest first.
std::vector<std::string> near_names(std::string_view wanted, const std::vector<std::string>& names) {
  std::vector<std::pair<std::size_t, std::string>> near;
  std::string lower(wanted.substr(0, 64));
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const auto& name : names) {
    const auto distance = edit_distance(lower, name);
    if (distance <= 1 + name.size() / 3 || (lower.size() >= 3 && name.starts_with(lower))) {
      near.emplace_back(distance, name);
    }
  }
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> result;
  for (auto& [distance, name] : near)
    if (result.size() < 3) result.push_back(std::move(name));
  return result;
}

[[noreturn]] void unknown_model(const std::string& wanted) {
  const auto names = builtin_model_names();
  const auto near = near_names(wanted, names);
  const std::string hint = near.empty() ? "" : fmt::format("; did you mean {}?", fmt::join(near, " or "));
  invalid_argument("model '{}': no built-in model, directory or file of this name{} Built in: {}", printable(wanted),
                   hint.empty() ? "." : hint, fmt::join(names, ", "));
}

}  // namespace

std::vector<std::string> builtin_model_names() {
  std::vector<std::string> names;
  for (const auto& model : builtin_models()) names.emplace_back(model.name);
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

/// A configuration before it is read: its text, what errors call its source, and the model's name.
struct ConfigText {
  std::string text, source, name;
};

ConfigText find_config_text(const std::string& name_or_path) {
  for (const auto& model : builtin_models()) {
    if (model.name == name_or_path) return {std::string(model.config_json), name_or_path, name_or_path};
  }
  std::error_code code;
  const std::filesystem::path path(name_or_path);
  const auto from_file = [](const std::filesystem::path& file, const std::string& name) {
    return ConfigText{read_text_file(file, kMaxConfigBytes), file.string(), name};
  };
  if (std::filesystem::is_directory(path, code)) {
    const auto full = std::filesystem::weakly_canonical(path, code);
    return from_file(path / "config.json", full.filename().string());
  }
  if (std::filesystem::exists(path, code)) {
    const bool plain = path.filename() == "config.json" && path.has_parent_path();
    return from_file(path, plain ? path.parent_path().filename().string() : path.stem().string());
  }
  unknown_model(name_or_path);
}

}  // namespace

ModelConfig load_model_config(const std::string& name_or_path) {
  const ConfigText found = find_config_text(name_or_path);
  return parse_model_config(parse_json(found.text, found.source), found.name);
}

std::string load_model_config_text(const std::string& name_or_path) { return find_config_text(name_or_path).text; }

}  // namespace isomer
