// The descriptions of models/ as the build embeds them (cmake/embed_json.cmake).
#pragma once

#include <span>
#include <string_view>

namespace isomer {

struct BuiltinModel {
  std::string_view name;
  std::string_view config_json;
};

/// Sorted by name.
std::span<const BuiltinModel> builtin_models();

}  // namespace isomer
