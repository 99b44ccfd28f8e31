// Collectives from 4 KiB to 16 MiB a block, checked, then timed, beside the memory copy bandwidth of as many threads.
//
//   bench_comm [--ranks 2] [--backend threads|mpi] [--json FILE]        (mpi: starts itself by mpirun)
//
// A block is what one rank sends to one other: of `size` bytes in an all-to-all, an all-gather and a reduce-scatter;
// the tensor of an all-reduce has `size` bytes. GB/s are bytes written into receive buffers (own block included) by
// one rank. "of copy" compares with memcpy: as many threads as ranks each copy the same number of blocks of the same
// size between memory of their own, without synchronising, at the same time; for reductions it is given for
// orientation only, since they also add.
#include <barrier>
#include <chrono>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/communicator.h"
#include "comm/group.h"

using namespace isomer;

namespace {

struct Options {
  int num_ranks = 2;
  Backend backend = Backend::threads;
  std::string json;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--ranks") options.num_ranks = std::stoi(value);
    if (name == "--backend") options.backend = value == "mpi" ? Backend::mpi : Backend::threads;
    if (name == "--json") options.json = value;
  }
  return options;
}

/// The median of `batches` timings of body, each of as many calls as take a few milliseconds.
template <class Body>
double seconds_per_call(std::int64_t bytes_per_call, const Body& body) {
  const std::int64_t calls = std::clamp<std::int64_t>((std::int64_t{64} << 20) / bytes_per_call, 4, 400);
  std::vector<double> seconds;
  for (int batch = 0; batch < 7; ++batch) {
    const double begin_s = wall_clock_s();
    for (std::int64_t call = 0; call < calls; ++call) body();
    seconds.push_back((wall_clock_s() - begin_s) / static_cast<double>(calls));
  }
  std::nth_element(seconds.begin(), seconds.begin() + 3, seconds.end());
  return seconds[3];
}

/// Bytes per second of each of `num_threads` threads that copy at the same time; the slowest.
double copy_bandwidth(int num_threads, std::int64_t block_bytes) {
  std::barrier start(num_threads);
  std::vector<double> bandwidth(static_cast<std::size_t>(num_threads));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      const auto bytes = static_cast<std::size_t>(num_threads * block_bytes);
      // As the ranks' tensors are: the same pages, the same alignment.
      const auto allocated = [&] {
        return Tensor::unrecorded("copy", DType::f32, {static_cast<std::int64_t>(bytes) / 4});
      };
      const Tensor source = allocated(), target = allocated();
      auto* const from = static_cast<char*>(source.raw());
      auto* const to = static_cast<char*>(target.raw());
      std::memset(from, 1, bytes);
      std::memset(to, 2, bytes);
      start.arrive_and_wait();
      const double seconds = seconds_per_call(static_cast<std::int64_t>(bytes), [&] {
        for (std::int64_t at = 0; at < static_cast<std::int64_t>(bytes); at += block_bytes)
          std::memcpy(to + at, from + at, static_cast<std::size_t>(block_bytes));
        asm volatile("" : : "r"(to) : "memory");
      });
      bandwidth[static_cast<std::size_t>(thread)] = static_cast<double>(bytes) / seconds;
    });
  }
  for (auto& thread : threads) thread.join();
  return *std::min_element(bandwidth.begin(), bandwidth.end());
}

struct Buffers {
  std::vector<Tensor> send, receive;
};

Buffers make_buffers(RankContext& ctx, std::int64_t block_bytes) {
  Buffers buffers;
  for (int peer = 0; peer < ctx.world_size(); ++peer) {
    for (auto* tensors : {&buffers.send, &buffers.receive}) {
      tensors->push_back(ctx.zeros("block", MemoryClass::communication, DType::f32, {block_bytes / 4}));
      std::fill_n(tensors->back().data<float>(), block_bytes / 4, static_cast<float>(ctx.rank() * 100 + peer));
    }
  }
  return buffers;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(fmt::format("{} delivered a wrong value", what));
}

struct Line {
  std::string collective;
  std::int64_t bytes;
  double seconds;
  double written;  // bytes
};

void measure(RankContext& ctx, std::int64_t bytes, std::vector<Line>& lines) {
  auto& comm = ctx.comm();
  const int num_ranks = comm.size();
  auto [send, receive] = make_buffers(ctx, bytes);
  const Tensor out = receive[0];
  const Tensor& mine = send[static_cast<std::size_t>(ctx.rank())];
  const auto time = [&](const char* name, double written, const auto& body) {
    comm.barrier();
    const double seconds = comm.max_over_ranks(seconds_per_call(num_ranks * bytes, body));
    lines.push_back({name, bytes, seconds, written});
  };
  const auto block = static_cast<double>(bytes);

  comm.all_to_all("block", send, receive);
  for (int peer = 0; peer < num_ranks; ++peer)
    require(receive[static_cast<std::size_t>(peer)].data<float>()[bytes / 4 - 1] ==
                static_cast<float>(peer * 100 + ctx.rank()),
            "all_to_all");
  time("all_to_all", num_ranks * block, [&] { comm.all_to_all("block", send, receive); });

  comm.all_gather("block", mine, receive);
  for (int peer = 0; peer < num_ranks; ++peer)
    require(receive[static_cast<std::size_t>(peer)].data<float>()[0] == static_cast<float>(peer * 101), "all_gather");
  time("all_gather", num_ranks * block, [&] { comm.all_gather("block", mine, receive); });

  comm.reduce_scatter("block", send, out);
  const int sum_of_ranks = num_ranks * (num_ranks - 1) / 2;
  require(out.data<float>()[1] == static_cast<float>(sum_of_ranks * 100 + num_ranks * ctx.rank()), "reduce_scatter");
  time("reduce_scatter", num_ranks * block, [&] { comm.reduce_scatter("block", send, out); });

  std::fill_n(out.data<float>(), bytes / 4, static_cast<float>(ctx.rank()));
  comm.all_reduce("block", out);
  require(out.data<float>()[bytes / 4 - 1] == static_cast<float>(sum_of_ranks), "all_reduce");
  time("all_reduce", 2 * block * (num_ranks - 1) / num_ranks, [&] { comm.all_reduce("block", out); });
}

void report(const Options& options, const std::vector<Line>& lines) {
  nlohmann::json json = {{"schema_version", 1},
                         {"version", ISOMER_VERSION},
                         {"backend", name_of(options.backend)},
                         {"ranks", options.num_ranks},
                         {"cores", std::thread::hardware_concurrency()}};
  fmt::print("{} ranks on {} cores, {}, f32\n", options.num_ranks, std::thread::hardware_concurrency(),
             name_of(options.backend));
  fmt::print("{:<15} {:>10} {:>12} {:>8} {:>12} {:>8}\n", "collective", "bytes", "time", "GB/s", "copy GB/s",
             "of copy");
  for (const auto& line : lines) {
    const double copy = copy_bandwidth(options.num_ranks, line.bytes);
    const double bandwidth = line.written / line.seconds;
    fmt::print("{:<15} {:>10} {:>9.1f} us {:>8.2f} {:>12.2f} {:>7.0f}%\n", line.collective, line.bytes,
               line.seconds * 1e6, bandwidth * 1e-9, copy * 1e-9, 100 * bandwidth / copy);
    json["results"].push_back({{"collective", line.collective},
                               {"bytes", line.bytes},
                               {"seconds", line.seconds},
                               {"bytes_per_s", bandwidth},
                               {"copy_bytes_per_s", copy}});
  }
  if (!options.json.empty()) std::ofstream(options.json) << json.dump(2) << "\n";
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = parse(argc, argv);
  const GroupOptions group{.backend = options.backend, .num_ranks = options.num_ranks, .threads_per_rank = 1};
  if (options.backend == Backend::mpi && !under_mpirun()) relaunch_under_mpirun(group, argc, argv);
  std::vector<Line> lines;
  run_group(group, [&](RankContext& ctx) {
    std::vector<Line> mine;
    for (std::int64_t bytes = 4 << 10; bytes <= 16 << 20; bytes *= 4) measure(ctx, bytes, mine);
    if (ctx.rank() == 0) lines = mine;
  });
  if (mpi_world().rank == 0) report(options, lines);
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
