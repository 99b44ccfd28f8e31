#include "comm/group.h"

#include <sched.h>

#include <system_error>
#include <thread>

#include "comm/communicator.h"
#include "comm/dry/dry_transport.h"
#include "comm/link.h"
#include "comm/mpi_backend.h"
#include "comm/run_rank.h"
#include "comm/threads/group.h"

namespace isomer {

namespace {

int num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

void check(const GroupOptions& options) {
  if (options.num_ranks < 1) invalid_argument("ranks = {}: must be at least 1", options.num_ranks);
  if (options.threads_per_rank < 0)
    invalid_argument("threads = {}: must be at least 1, or 0 for a share of the cores", options.threads_per_rank);
  if (!(options.timeout_s > 0)) invalid_argument("timeout = {} s: must be above 0", options.timeout_s);
}

/// How the ranks of one process are run: as threads side by side, or dry, one after another.
class ThreadRanks {
 public:
  ThreadRanks(const GroupOptions& options, const std::function<void(RankContext&)>& body)
      : options_(options),
        transport_options_(transport_options(options)),
        body_(body),
        world_(options.num_ranks, options.timeout_s),
        baton_(options.num_ranks) {
    for (int rank = 0; rank < options.num_ranks; ++rank) all_.push_back(rank);
    if (measures_link(options)) transport_options_.link.bandwidth_bytes_per_s = copy_bandwidth_bytes_per_s();
  }

  void run() {
    std::vector<std::thread> threads;
    try {
      for (int rank : all_) threads.emplace_back([this, rank] { run_one(rank); });
    } catch (const std::system_error& error) {
      const auto text = fmt::format("no thread for rank {}: {}", threads.size(), error.what());
      world_.fail(0, {text, text});
      for (int rank = static_cast<int>(threads.size()); rank < options_.num_ranks; ++rank) world_.leave(rank);
      baton_.skip_from(static_cast<int>(threads.size()));
    }
    for (auto& thread : threads) thread.join();
    if (world_.failed()) rethrow(world_.failure());
  }

 private:
  /// The time in which peers may look at a rank's signs of life. At its end the communicator goes, its thread first.
  class Membership {
   public:
    Membership(World& world, RankContext& ctx) : world_(world), ctx_(ctx) { world.join(ctx.rank(), ctx.heartbeat()); }
    ~Membership() {
      ctx_.attach(nullptr);
      world_.leave(ctx_.rank());
    }
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

   private:
    World& world_;
    RankContext& ctx_;
  };

  void run_one(int rank) {
    if (options_.dry_run) take_turn(rank);
    try {
      run_context(rank);
    } catch (...) {
      world_.explain(rank, current_failure(rank));
      world_.leave(rank);
    }
    if (options_.dry_run) baton_.release();
  }

  void run_context(int rank) {
    RankContext ctx(rank_options(options_, rank));
    const Membership membership(world_, ctx);
    ctx.attach(std::make_shared<Communicator>(ctx, make_transport(rank)));
    try {
      if (!options_.dry_run || !world_.failed()) body_(ctx);
    } catch (...) {
      world_.explain(rank,
                     current_failure(rank));  // before the communicator goes, which may still be waiting for peers
    }
  }

  void take_turn(int rank) {
    world_.begin_wait(rank, nullptr);
    baton_.acquire(rank);
    world_.end_wait(rank);
  }

  std::shared_ptr<Transport> make_transport(int rank) {
    auto transport = std::make_shared<ThreadsTransport>(transport_options_, world_.group(0, all_), rank);
    if (!options_.dry_run) return transport;
    return std::make_shared<DryTransport>(std::move(transport), baton_);
  }

  const GroupOptions& options_;
  TransportOptions transport_options_;
  const std::function<void(RankContext&)>& body_;
  World world_;
  Baton baton_;
  std::vector<int> all_;
};

}  // namespace

std::string_view name_of(Backend backend) { return backend == Backend::threads ? "threads" : "mpi"; }

int threads_per_rank(const GroupOptions& options) {
  if (options.threads_per_rank > 0) return options.threads_per_rank;
  if (options.dry_run) return 1;  // what a dry run says must not depend on the machine it is asked on
  return std::max(1, num_cores() / ranks_on_this_machine(options));
}

bool clock_is_virtual(const GroupOptions& options) {
  return options.dry_run || ranks_on_this_machine(options) * threads_per_rank(options) > num_cores();
}

RankOptions rank_options(const GroupOptions& options, int rank) {
  return {.rank = rank,
          .world_size = options.num_ranks,
          .num_threads = threads_per_rank(options),
          .dry_run = options.dry_run,
          .memory_policy = options.memory_policy,
          .heartbeat = options.heartbeat};
}

bool measures_link(const GroupOptions& options) {
  return !options.dry_run && options.num_ranks > 1 && !options.link.emulated && options.link.bandwidth_bytes_per_s == 0;
}

TransportOptions transport_options(const GroupOptions& options) {
  return {.link = options.link, .real_time = options.link.emulated && !clock_is_virtual(options)};
}

void run_group(const GroupOptions& options, const std::function<void(RankContext&)>& body) {
  check(options);
  // A dry run has no use for processes: its ranks are counted, not run.
  if (options.backend == Backend::mpi && !options.dry_run) {
    run_mpi_group(options, body);
  } else {
    ThreadRanks(options, body).run();
  }
}

}  // namespace isomer
