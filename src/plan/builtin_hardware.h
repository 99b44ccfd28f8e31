// The descriptions of hardware/ as the build embeds them (cmake/embed_json.cmake).
#pragma once

#include <span>
#include <string_view>

namespace isomer {

struct BuiltinHardware {
  std::string_view name;
  std::string_view json;
};

/// Sorted by name.
std::span<const BuiltinHardware> builtin_hardware();

}  // namespace isomer
