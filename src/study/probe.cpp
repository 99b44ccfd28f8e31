#include "study/probe.h"

#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/tensor.h"
#include "plan/fit.h"
#include "plan/fit_report.h"
#include "plan/hardware_json.h"
#include "study/machine.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr int kMaxRanks = 64, kMaxThreads = 1024;

/// The best rate that any sample of this kind and precision reached.
double best_rate(const SampleFamilies& families, OperationKind kind, Precision precision) {
  double best = 0;
  for (const auto& [label, family] : families) {
    if (family.curve.kind != kind || family.curve.compute != precision) continue;
    for (const TimedOperation& sample : family.samples) {
      const OpCost cost = cost_of(sample.operation);
      best = std::fmax(best, (is_collective(kind) ? cost.bytes_written : cost.flops) / sample.seconds);
    }
  }
  return best;
}

double shortest(const SampleFamilies& families, OperationKind kind) {
  double best = INFINITY;
  for (const auto& [label, family] : families) {
    if (family.curve.kind != kind) continue;
    for (const TimedOperation& sample : family.samples) best = std::fmin(best, sample.seconds);
  }
  return best;
}

json links_json(const ProbeOptions& options, const SampleFamilies& families) {
  if (options.num_ranks < 2) return json::array();
  return json::array({{{"name", "threads of one process"},
                       {"devices", options.num_ranks},
                       {"latency_s", shortest(families, OperationKind::send_receive)},
                       {"bandwidth_bytes_per_s", best_rate(families, OperationKind::send_receive, Precision::f32)}}});
}

json figures_json(const ProbeOptions& options) {
  const std::string how = fmt::format("isomer probe {}, {}: one rank of {} thread(s)", ISOMER_VERSION, processor_name(),
                                      options.threads_per_rank);
  return json::array(
      {{{"figure", "memory.bandwidth_bytes_per_s"},
        {"source", how + ", reading 256 MiB"},
        {"doubt", "one thread alone; ranks that read at the same time share the memory and each get less"}},
       {{"figure", "memory.capacity_bytes"}, {"source", "the system's memory over the number of ranks"}},
       {{"figure", "flops_per_s"},
        {"source", how + ", the fastest of the matrix products timed"},
        {"doubt",
         "the clock of a shared machine drifts, by up to 2 times from hour to hour; operands of repeated calls stand "
         "in the caches where they fit"}},
       {{"figure", "links"},
        {"source", fmt::format("{}, send and receive between {} ranks", how, options.num_ranks)},
        {"doubt", "a copy through shared memory, which kernels beside it slow down"}}});
}

json description(const ProbeOptions& options, const SampleFamilies& families) {
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  json rates = {{"f32", best_rate(families, OperationKind::gemm, Precision::f32)}};
  const double bf16 = best_rate(families, OperationKind::gemm, Precision::bf16);
  if (bf16 > 0) rates["bf16"] = bf16;
  return {{"schema_version", kHardwareSchemaVersion},
          {"name", "this-machine"},
          {"description", fmt::format("{}: one rank of {} thread(s)", processor_name(), options.threads_per_rank)},
          {"memory",
           {{"bandwidth_bytes_per_s", read_bandwidth() * options.threads_per_rank},
            {"capacity_bytes", memory / std::max(1, options.num_ranks)}}},
          {"flops_per_s", rates},
          {"links", links_json(options, families)},
          {"figures", figures_json(options)}};
}

void check(const ProbeOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMaxRanks) {
    invalid_argument("probe: --ranks {}: must lie between 1 and {}", options.num_ranks, kMaxRanks);
  }
  if (options.threads_per_rank < 1 || options.threads_per_rank > kMaxThreads) {
    invalid_argument("probe: --threads {}: must lie between 1 and {}", options.threads_per_rank, kMaxThreads);
  }
}

}  // namespace

double read_bandwidth() {
  constexpr std::int64_t kWords = std::int64_t{32} << 20;
  const Tensor block = Tensor::unrecorded("read", DType::f64, {kWords});
  auto* const words = static_cast<std::uint64_t*>(block.raw());
  for (std::int64_t i = 0; i < kWords; ++i) words[i] = static_cast<std::uint64_t>(i);
  double best = 0;
  volatile std::uint64_t keep = 0;
  for (int pass = 0; pass < 6; ++pass) {
    const double begin_s = wall_clock_s();
    std::uint64_t sums[8] = {};
    for (std::int64_t i = 0; i < kWords; i += 8) {
      for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
    }
    for (const std::uint64_t sum : sums) keep = keep + sum;
    best = std::fmax(best, static_cast<double>(block.nbytes()) / (wall_clock_s() - begin_s));
  }
  return best;
}

ProbeResult probe_machine(const ProbeOptions& options) {
  check(options);
  SampleFamilies families;
  sample_kernels(options, families);
  if (options.num_ranks > 1) sample_collectives(options, families);
  ProbeResult result;
  for (const auto& [label, family] : families) result.num_shapes += family.samples.size();
  const json figures = description(options, families);
  const Hardware hardware = parse_hardware(figures, "this-machine");
  result.curves = fit_all(
      hardware, families, [&](const std::string& label) { options.progress("fitting " + label); }, &result.not_fitted);
  result.hardware = with_curves(figures, result.curves,
                                fit_json(fmt::format("isomer probe on this machine, {} shapes", result.num_shapes)));
  return result;
}

}  // namespace isomer
