#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "comm/communicator.h"
#include "comm/failure.h"
#include "comm/link.h"
#include "comm/mpi/transport.h"
#include "comm/mpi_backend.h"
#include "comm/run_rank.h"

namespace isomer {

namespace {

/// Ends the whole world with this error. Where all ranks fail alike, the lowest comes first and speaks for them.
[[noreturn]] void end_world(int rank, const std::string& message) {
  own_call_slot().state.store(RankState::failed);
  std::this_thread::sleep_for(std::chrono::milliseconds(std::min(2000, 200 * rank)));
  fmt::print(stderr, "error: {}\n", message);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}

}  // namespace

bool mpi_available() { return true; }

void run_mpi_group(const GroupOptions& options, const std::function<void(RankContext&)>& body) {
  MpiLibrary& library = MpiLibrary::instance();
  if (options.num_ranks != library.size())
    invalid_argument("ranks = {}: this process is in an MPI world of {}; start it by mpirun -n {}", options.num_ranks,
                     library.size(), options.num_ranks);
  RankContext ctx(rank_options(options, library.rank()));
  auto world = std::make_shared<MpiWorld>(library, library.next_run(), options.timeout_s, ctx.heartbeat());
  std::vector<int> all;
  for (int rank = 0; rank < library.size(); ++rank) all.push_back(rank);
  auto transport = std::make_shared<MpiTransport>(transport_options(options), world, all, 0);
  auto communicator = std::make_shared<Communicator>(ctx, transport);
  ctx.attach(communicator);
  try {
    if (measures_link(options)) {
      // One figure for all, measured while the others wait.
      transport->set_bandwidth(communicator->max_over_ranks(library.rank() == 0 ? copy_bandwidth_bytes_per_s() : 0.0));
    }
    body(ctx);
    communicator->end_run();
  } catch (...) {
    const Failure failure = current_failure(library.rank());
    world->abandon();
    communicator.reset();
    ctx.attach(nullptr);  // joins the communication thread: MPI is called by one thread at a time
    end_world(library.rank(), failure.message);
  }
  communicator.reset();
  ctx.attach(nullptr);
}

}  // namespace isomer
