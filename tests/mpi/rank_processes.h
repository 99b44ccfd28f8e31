// The processes of a run under Open MPI, found from outside.
#pragma once

#include <charconv>
#include <map>

#include "comm/group.h"
#include "study/program.h"

namespace isomer::testing {

inline bool can_start_mpirun() { return mpi_available() && std::system("mpirun --version > /dev/null 2>&1") == 0; }

/// Processes of this run with a rank number in their environment, by rank.
inline std::map<int, pid_t> ranks_of(const std::string& run) {
  std::map<int, pid_t> ranks;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ptr != name.data() + name.size()) continue;
    if (text_of(entry.path() / "cmdline").find(run) == std::string::npos) continue;
    const std::string environment = '\0' + text_of(entry.path() / "environ");
    const std::string key = std::string(1, '\0') + "OMPI_COMM_WORLD_RANK=";
    const auto found = environment.find(key);
    if (found != std::string::npos) ranks[std::atoi(environment.c_str() + found + key.size())] = pid;
  }
  return ranks;
}

}  // namespace isomer::testing
