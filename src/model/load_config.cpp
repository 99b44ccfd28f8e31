// Finding a configuration: by built-in name, directory or file.
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/near_names.h"
#include "model/builtin_models.h"
#include "model/config.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxConfigBytes = 16 << 20;

ModelConfig load_file(const std::filesystem::path& path, const std::string& name) {
  const std::string text = read_text_file(path, kMaxConfigBytes);
  return parse_model_config(parse_json(text, path.string()), name);
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

ModelConfig load_model_config(const std::string& name_or_path) {
  for (const auto& model : builtin_models()) {
    if (model.name == name_or_path) {
      return parse_model_config(parse_json(model.config_json, name_or_path), name_or_path);
    }
  }
  std::error_code code;
  const std::filesystem::path path(name_or_path);
  if (std::filesystem::is_directory(path, code)) {
    const auto full = std::filesystem::weakly_canonical(path, code);
    return load_file(path / "config.json", full.filename().string());
  }
  if (std::filesystem::exists(path, code)) {
    const bool plain = path.filename() == "config.json" && path.has_parent_path();
    return load_file(path, plain ? path.parent_path().filename().string() : path.stem().string());
  }
  unknown_model(name_or_path);
}

}  // namespace isomer
