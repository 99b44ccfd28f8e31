// Finding a configuration: by built-in name, directory or file.
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/near_names.h"
#include "model/builtin_models.h"
#include "model/config.h"
#include "model/gguf/config.h"
#include "model/json_text.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxConfigBytes = 16 << 20;

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
  if (is_gguf_file(path)) return {gguf_config_json(GgufFile(path)), path.string(), path.stem().string()};
  if (std::filesystem::exists(path, code)) {
    const bool plain = path.filename() == "config.json" && path.has_parent_path();
    return from_file(path, plain ? path.parent_path().filename().string() : path.stem().string());
  }
  unknown_model(name_or_path);
}

}  // namespace

ModelConfig load_model_config(const std::string& name_or_path) {
  const ConfigText found = find_config_text(name_or_path);
  const nlohmann::json json = parse_json(found.text, found.source);
  if (!is_gguf_file(name_or_path)) return parse_model_config(json, found.name);
  try {
    return parse_model_config(json, found.name);
  } catch (const std::exception& error) {  // which knows nothing of the file
    throw Error(fmt::format("{}: by its metadata: {}", found.source, error.what()));
  }
}

std::string load_model_config_text(const std::string& name_or_path) { return find_config_text(name_or_path).text; }

}  // namespace isomer
