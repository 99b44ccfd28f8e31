#include "apps/isomer/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

/// Its directory; the present one where none is named.
fs::path folder_of(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

/// The file that a name stands for, through links.
fs::path target_of(const std::string& file) {
  std::error_code code;
  const fs::path target = fs::weakly_canonical(file, code);
  return code ? fs::path(file) : target;
}

[[noreturn]] void cant_be_written(const std::string& option, const std::string& file, const std::string& why) {
  invalid_argument("{} {}: can't be written: {}; name another file", option, file, why);
}

/// Only trying tells: virtual and read-only file systems refuse what permissions allow. Nothing stays behind.
void try_writing(const std::string& option, const std::string& file) {
  std::error_code code;
  const fs::path target = target_of(file);
  if (!fs::exists(target, code) || fs::is_regular_file(target, code)) {  // written beside it, then renamed
    const fs::path folder = folder_of(target);
    std::string probe = (folder / (".isomer-" + std::string(6, 'X'))).string();  // mkstemp's pattern, which it fills in
    const int descriptor = mkstemp(probe.data());
    if (descriptor < 0) {
      const std::string why = std::strerror(errno);
      cant_be_written(option, file, fmt::format("no file can be made in '{}': {}", folder.string(), why));
    }
    close(descriptor);
    unlink(probe.c_str());
  } else if (!fs::is_fifo(target, code)) {  // a pipe may wait for its reader
    const int descriptor = open(target.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0) cant_be_written(option, file, std::strerror(errno));
    close(descriptor);
  }
}

}  // namespace

void check_output_file(const std::string& option, const std::string& file) {
  if (file.empty()) return;
  std::error_code code;
  const fs::path path(file), folder = folder_of(path);
  if (!fs::is_directory(folder, code)) {
    invalid_argument("{} {}: there is no directory '{}'; make it first", option, file, folder.string());
  }
  if (fs::is_directory(path, code)) invalid_argument("{} {}: it is a directory; name a file in it", option, file);
  const bool there = fs::exists(path, code);
  if (access(there ? path.c_str() : folder.c_str(), W_OK) != 0) cant_be_written(option, file, std::strerror(errno));
  constexpr std::size_t kMaxName = 240;  // of the 255 bytes of most file systems, with room for a suffix
  if (path.filename().string().size() > kMaxName) {
    invalid_argument("{} {}: the name has {} bytes, at most {} can be written", option, file,
                     path.filename().string().size(), kMaxName);
  }
  try_writing(option, file);
}

void check_different_files(const std::string& option, const std::string& file, const std::string& other_option,
                           const std::string& other) {
  if (file.empty() || other.empty() || target_of(file) != target_of(other)) return;
  invalid_argument("{} {}: {} names the same file; give them one each", option, file, other_option);
}

void write_output_file(const std::string& option, const std::string& file, const std::string& text) {
  std::error_code code;
  const fs::path target = target_of(file);
  if (!fs::exists(target, code) || fs::is_regular_file(target, code)) {
    try {
      write_text_atomically(target, text);
    } catch (const Error& error) {
      throw Error(fmt::format("{} {}: can't be written: {}", option, file, error.what()));
    }
    return;
  }
  std::ofstream out(target, std::ios::binary);  // a pipe, a terminal
  out << text;
  out.close();
  if (!out) throw Error(fmt::format("{} {}: can't be written: {}", option, file, std::strerror(errno)));
}

void write_output_file(const std::string& option, const std::string& file, const nlohmann::json& json) {
  write_output_file(option, file, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace isomer
