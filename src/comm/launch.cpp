// Launching under Open MPI, and what its launcher says in the environment.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comm/call_board.h"
#include "comm/group.h"
#include "comm/last_words.h"
#include "comm/run_rank.h"
#include "core/error.h"
#include "core/record.h"

namespace isomer {

namespace {

constexpr const char* kBoardVariable = "ISOMER_CALL_BOARD";
constexpr auto kTick = std::chrono::milliseconds(100);
// Ranks in a call notice a stall themselves, and know more of it.
constexpr double kGrace_s = 3;

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

/// Where a process that mpirun started shows itself. Stays as long as the process: its thread ticks to the end.
struct Launched {
  std::unique_ptr<CallBoard> board;
  CallSlot alone;
  CallSlot* slot = &alone;
};

Launched* make_launched() {
  auto* launched = new Launched;
  const int rank = mpi_world().rank;
  const char* path = std::getenv(kBoardVariable);
  if (path != nullptr) launched->board = CallBoard::open(path);
  if (launched->board && rank >= launched->board->num_ranks()) launched->board.reset();
  if (launched->board) launched->slot = &launched->board->slot(rank);
  launched->slot->state.store(RankState::running);
  install_last_words(rank, *launched->slot);
  return launched;
}

Launched& launched() {
  static Launched* const place = make_launched();
  return *place;
}

void show_end() {
  launched().slot->change(RankState::in_call, RankState::ended);
  launched().slot->change(RankState::running, RankState::ended);
}

void tick() {
  for (;; std::this_thread::sleep_for(kTick)) launched().slot->ticks.fetch_add(1, std::memory_order_relaxed);
}

/// Waits for mpirun's end and returns its exit status, after a line on stderr about each rank that was lost.
int watch_launcher(const CallBoard& board, double timeout_s) {
  ProcessWatch watch(board, timeout_s + kGrace_s);
  std::string stalled;
  int status = 0;
  for (pid_t ended = 0; ended != launcher && (ended >= 0 || errno == EINTR);
       ended = waitpid(launcher, &status, WNOHANG)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!stalled.empty()) continue;
    stalled = watch.verdict(wall_clock_s());
    if (stalled.empty()) continue;
    fmt::print(stderr, "{}", stalled);
    kill(launcher, SIGTERM);
  }
  if (!stalled.empty()) return 1;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code != 0 && signals_passed_on == 0) fmt::print(stderr, "{}", board.lost());
  return code;
}

/// Runs `words` in a process group of its own, out of the terminal's reach, and returns its exit status. Throws if it
/// can't be started.
int run_launcher(std::vector<char*> words, const CallBoard& board, double timeout_s) {
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
  int error = 0;
  const bool failed = read(failure[0], &error, sizeof error) == static_cast<ssize_t>(sizeof error);
  close(failure[0]);
  if (failed) {
    while (waitpid(launcher, nullptr, 0) < 0 && errno == EINTR) {}
    throw Error(
        fmt::format("backend = mpi: can't start mpirun: {}; install Open MPI (openmpi-bin)", std::strerror(error)));
  }
  return watch_launcher(board, timeout_s);
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

CallSlot& own_call_slot() { return *launched().slot; }

const CallBoard* launchers_board() { return launched().board.get(); }

void join_launcher() {
  static const bool joined = [] {
    if (!under_mpirun()) return false;
    if (launched().board) std::thread(tick).detach();
    std::atexit(show_end);
    return true;
  }();
  (void)joined;
}

void relaunch_under_mpirun(const GroupOptions& options, int argc, char** argv) {
  if (!mpi_available())
    invalid_argument(
        "backend = mpi: this build has no MPI; install Open MPI (libopenmpi-dev) and configure again, or "
        "use the threads backend");
  // Root and more ranks than cores are refused by default; pinning would put threads of a rank on one core; ranks of
  // one machine need neither InfiniBand nor the kernel's cross-memory copy, which containers forbid.
  std::vector<std::string> words = {"mpirun",          "-n",        std::to_string(options.num_ranks),
                                    "--oversubscribe", "--bind-to", "none"};
  if (geteuid() == 0) words.insert(words.end(), {"--allow-run-as-root"});
  words.insert(words.end(), {"--mca", "btl_base_warn_component_unused", "0", "--mca", "btl_vader_single_copy_mechanism",
                             "none", "--mca", "mpi_yield_when_idle", "1"});
  words.insert(words.end(), argv, argv + argc);
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const auto board = CallBoard::create(options.num_ranks);
  setenv(kBoardVariable, board->path().c_str(), 1);
  const int code = run_launcher(std::move(pointers), *board, options.timeout_s);
  std::fflush(stderr);
  std::_Exit(code);
}

}  // namespace isomer
