// Launching under Open MPI, and what its launcher says in the environment.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
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

// A signal handler can reach nothing but statics.
volatile pid_t launcher = 0;
volatile std::sig_atomic_t signals_passed_on = 0;

/// mpirun answers Ctrl-C by killing its ranks. It hands SIGUSR1 on to them, by which a run that can stops in good
/// order; a second Ctrl-C is meant.
void pass_on(int) {
  signals_passed_on = signals_passed_on + 1;
  kill(launcher, signals_passed_on == 1 ? SIGUSR1 : SIGTERM);
}

/// Runs `words` in a process group of its own, out of the terminal's reach, and returns its exit status. Throws if it
/// can't be started.
int run_launcher(std::vector<char*> words) {
  int failure[2];
  if (pipe2(failure, O_CLOEXEC) != 0) throw Error(fmt::format("backend = mpi: no pipe: {}", std::strerror(errno)));
  const pid_t parent = getpid();
  launcher = fork();
  if (launcher < 0) throw Error(fmt::format("backend = mpi: can't start a process: {}", std::strerror(errno)));
  if (launcher == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int nothing = open("/dev/null", O_RDONLY);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    if (getppid() == parent) execvp(words[0], words.data());
    const int error = errno;
    [[maybe_unused]] const auto written = write(failure[1], &error, sizeof error);
    _exit(127);
  }
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, pass_on);
  close(failure[1]);
  int error = 0, status = 0;
  const bool failed = read(failure[0], &error, sizeof error) == static_cast<ssize_t>(sizeof error);
  close(failure[0]);
  while (waitpid(launcher, &status, 0) < 0 && errno == EINTR) {}
  if (failed) {
    throw Error(
        fmt::format("backend = mpi: can't start mpirun: {}; install Open MPI (openmpi-bin)", std::strerror(error)));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
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
  std::_Exit(run_launcher(std::move(pointers)));
}

}  // namespace isomer
