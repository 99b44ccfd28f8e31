// Starting a group of ranks: threads of this process, processes under MPI, or one dry rank after another.
#pragma once

#include <atomic>
#include <functional>
#include <string_view>

#include "core/rank_context.h"
#include "core/virtual_clock.h"

namespace isomer {

enum class Backend : std::uint8_t { threads, mpi };
std::string_view name_of(Backend backend);

struct GroupOptions {
  Backend backend = Backend::threads;
  int num_ranks = 1;
  int threads_per_rank = 0;  // 0: max(1, cores / ranks)
  bool dry_run = false;
  MemoryPolicy memory_policy = MemoryPolicy::lean;
  LinkModel link;          // emulated in wall time where each rank has a core, else on the virtual clock
  double timeout_s = 600;  // a peer without a sign of life for so long has stalled
  /// Of a rank of another run that waits for this one: operations here are its signs of life too.
  std::atomic<std::uint64_t>* heartbeat = nullptr;
};

/// The threads a rank gets under these options.
int threads_per_rank(const GroupOptions& options);
/// True where ranks (times their threads) exceed the cores, so that only the virtual clock is meaningful.
bool clock_is_virtual(const GroupOptions& options);

/// Calls body once for every rank and returns when all are done. Under MPI the process is one rank of a world that
/// must have num_ranks ranks, and body is called once here. Throws what the first failing rank threw (as isomer::Error
/// naming the rank, std::invalid_argument kept as it is); no rank is left waiting.
void run_group(const GroupOptions& options, const std::function<void(RankContext&)>& body);

/// Under a launcher (mpirun): this process's rank in the world and its size; {0, 1} otherwise.
struct WorldPlace {
  int rank = 0;
  int size = 1;
};
WorldPlace mpi_world();
/// True if this build has the MPI backend.
bool mpi_available();
/// True if this process was started by mpirun.
bool under_mpirun();
/// Of a process that mpirun started: from now on it shows its launcher, and the other ranks of its machine, that it
/// runs and in which call it is, and SIGTERM ends it with a line that says so. To be called early; elsewhere does
/// nothing.
void join_launcher();
/// Runs `mpirun -n ranks <same command line>` with the flags that a small machine, or root, needs, and ends this
/// process with its status. A rank that died is named on stderr, with the call it was in; one whose process stands
/// still for timeout_s and a few seconds ends all, with a line that names it. The first SIGINT or SIGTERM reaches the
/// ranks as SIGUSR1, which asks a training run to stop with a checkpoint and ends any other; the second ends them at
/// once. Returns only by throwing.
[[noreturn]] void relaunch_under_mpirun(const GroupOptions& options, int argc, char** argv);

}  // namespace isomer
