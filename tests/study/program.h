// Runs the program itself, as a user would.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "core/record.h"
#include "model/temp_folder.h"

namespace isomer::testing {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal where one ended it
  std::string out, err;
  double seconds = 0;
};

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// `arguments` as a shell takes them.
inline ProgramResult run_shell(const std::string& command) {
  const TempFolder folder;
  const auto errors = folder.path() / "stderr";
  ProgramResult result;
  const double begin_s = wall_clock_s();
  FILE* pipe = popen(fmt::format("({}) 2> '{}'", command, errors.string()).c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> part{};
  for (std::size_t size; (size = fread(part.data(), 1, part.size(), pipe)) > 0;) result.out.append(part.data(), size);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.seconds = wall_clock_s() - begin_s;
  result.err = text_of(errors);
  return result;
}

inline ProgramResult run_isomer(const std::string& arguments) {
  return run_shell(fmt::format("{}/isomer {}", ISOMER_BINARY_DIR, arguments));
}

}  // namespace isomer::testing
