// Launching under Open MPI, and what its launcher says in the environment.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/run_rank.h"
#include "core/error.h"

namespace isomer {

namespace {

int environment_number(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

}  // namespace

bool under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

WorldPlace mpi_world() {
  return {environment_number("OMPI_COMM_WORLD_RANK", 0), environment_number("OMPI_COMM_WORLD_SIZE", 1)};
}

int ranks_on_this_machine(const GroupOptions& options) {
  if (options.backend != Backend::mpi) return options.num_ranks;
  return environment_number("OMPI_COMM_WORLD_LOCAL_SIZE", options.num_ranks);
}

void relaunch_under_mpirun(int num_ranks, int argc, char** argv) {
  if (!mpi_available())
    invalid_argument(
        "backend = mpi: this build has no MPI; install Open MPI (libopenmpi-dev) and configure again, or "
        "use the threads backend");
  // Root and more ranks than cores are refused by default; pinning would put threads of a rank on one core; ranks of
  // one machine need neither InfiniBand nor the kernel's cross-memory copy, which containers forbid.
  std::vector<std::string> words = {"mpirun", "-n", std::to_string(num_ranks), "--oversubscribe", "--bind-to", "none"};
  if (geteuid() == 0) words.insert(words.end(), {"--allow-run-as-root"});
  words.insert(words.end(), {"--mca", "btl_base_warn_component_unused", "0", "--mca", "btl_vader_single_copy_mechanism",
                             "none", "--mca", "mpi_yield_when_idle", "1"});
  words.insert(words.end(), argv, argv + argc);
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  throw Error(
      fmt::format("backend = mpi: can't start mpirun: {}; install Open MPI (openmpi-bin)", std::strerror(errno)));
}

}  // namespace isomer
