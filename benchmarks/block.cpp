// Where the time of one block goes: every operation of a scheme's forward and backward with its share of the machine's
// multiply-add peak, and what is outside kernels and collectives. Results are checked against one rank in float64
// first.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fma_peak.h"
#include "model/text.h"
#include "study/compare.h"
#include "study/machine.h"
#include "study/weights_source.h"

namespace {

using namespace isomer;

struct Arguments {
  std::string model = "deepseek-v2-lite", scheme = "laga", json_file;
  std::int64_t seq = 4096;
  int ranks = 2;
  DType dtype = DType::f32;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--model") a.model = value;
    if (option == "--scheme") a.scheme = value;
    if (option == "--seq") a.seq = std::stoll(value);
    if (option == "--ranks") a.ranks = std::stoi(value);
    if (option == "--dtype") a.dtype = value == "bf16" ? DType::bf16 : DType::f32;
    if (option == "--json") a.json_file = value;
  }
  return a;
}

/// A small block under the same scheme must agree with one rank before anything is timed.
void check(const Arguments& a) {
  CompareOptions options;
  options.problem.config = load_model_config("tiny-mla");
  options.problem.dtype = a.dtype;
  options.problem.seq = 96;
  options.group.num_ranks = a.ranks;
  options.layouts = {parse_layout(a.scheme)};
  const BlockData data = load_block_data(options.problem, {}, std::string(default_text()), 1, false);
  if (!compare_schemes(options, data, [](const std::string&) {}).good())
    throw Error("the scheme disagrees with one rank");
}

void print_operations(const RankMeasure& m, double peak_flops) {
  std::vector<std::pair<std::string, double>> ops(m.seconds_by_op.begin(), m.seconds_by_op.end());
  std::sort(ops.begin(), ops.end(), [](const auto& x, const auto& y) { return x.second > y.second; });
  fmt::print("{:<40} {:>10} {:>10} {:>8}\n", "operation", "ms", "GFLOP/s", "of peak");
  for (const auto& [name, seconds] : ops) {
    if (seconds < 0.002 * m.seconds) continue;
    const double rate = m.flops_by_op.at(name) / seconds;
    fmt::print("{:<40} {:>10.2f} {:>10.1f} {:>7.1f}%\n", name, seconds * 1e3, rate / 1e9, 100 * rate / peak_flops);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  check(a);
  BlockProblem problem{.config = load_model_config(a.model), .dtype = a.dtype, .seq = a.seq};
  const BlockData data = load_block_data(problem, {}, std::string(default_text()), 1, false);
  BlockRunOptions options;
  options.group.num_ranks = a.ranks;
  options.repetitions = 4;
  options.collect_results = false;
  const BlockRun run = run_block(problem, data, parse_layout(a.scheme), options);
  const double peak = 1e9 * fma_peak_gflops(a.dtype);
  const RankMeasure& m = *std::max_element(run.ranks.begin(), run.ranks.end(),
                                           [](const auto& x, const auto& y) { return x.seconds < y.seconds; });
  const double flops = m.flops_forward + m.flops_backward;
  fmt::print("{}: {}, {} tokens, {}, {} ranks, {} threads a rank, {} clock; {}\n", a.scheme, a.model, a.seq,
             name_of(a.dtype), a.ranks, run.threads_per_rank, run.virtual_clock ? "virtual" : "wall", processor_name());
  print_operations(m, peak * run.threads_per_rank);
  fmt::print("forward {:.1f} ms, backward {:.1f} ms: {:.1f} GFLOP/s a rank, {:.1f} % of the peak ({:.1f})\n",
             m.seconds_forward * 1e3, (m.seconds - m.seconds_forward) * 1e3, flops / m.seconds / 1e9,
             100 * flops / m.seconds / (peak * run.threads_per_rank), peak / 1e9);
  fmt::print("kernels {:.1f} %, collectives {:.1f} %, outside both {:.1f} %\n", 100 * m.seconds_kernels / m.seconds,
             100 * m.seconds_waiting / m.seconds, 100 * m.seconds_other() / m.seconds);
  if (a.json_file.empty()) return 0;
  nlohmann::json json = machine_json(run.threads_per_rank, 1);
  json.update({{"benchmark", "block"},
               {"model", a.model},
               {"scheme", a.scheme},
               {"seq", a.seq},
               {"ranks", a.ranks},
               {"dtype", name_of(a.dtype)},
               {"peak_flops", peak},
               {"flops", flops},
               {"seconds", m.seconds},
               {"seconds_kernels", m.seconds_kernels},
               {"seconds_collectives", m.seconds_waiting},
               {"seconds_other", m.seconds_other()},
               {"seconds_by_op", m.seconds_by_op},
               {"flops_by_op", m.flops_by_op}});
  std::ofstream(a.json_file) << json.dump(2) << "\n";
  return 0;
}
