#include "apps/isomer/shipped_model.h"

#include <algorithm>
#include <filesystem>

#include "model/config.h"

namespace isomer {

std::string shipped_model(const std::string& model) {
  namespace fs = std::filesystem;
  const auto names = builtin_model_names();
  if (std::find(names.begin(), names.end(), model) == names.end()) return model;
  std::error_code code;
  const fs::path executable = fs::read_symlink("/proc/self/exe", code);
  for (const fs::path& root : {executable.parent_path(), fs::path(ISOMER_SOURCE_DIR)}) {
    const fs::path directory = root / "models" / model;
    if (!root.empty() && fs::is_regular_file(directory / "model.safetensors", code)) return directory.string();
  }
  return model;
}

}  // namespace isomer
