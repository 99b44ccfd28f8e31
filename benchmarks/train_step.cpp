// A training step end to end: tiny-mla, and a dense model of the same size; one rank and two, every scheme side by
// side. Says tokens/s, the share of the machine's multiply-add peak, and where the time goes. Each run is held against
// one rank first: the same loss, and a loss that falls.
//
// Shares are by processor time (all ranks' threads, waiting included), which other programs on the machine change
// little, and by wall time.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "comm/group.h"
#include "fma_peak.h"
#include "model/text.h"
#include "sharding/sequence_layout.h"
#include "study/machine.h"
#include "train/adamw.h"
#include "train/language_model.h"

namespace {

using namespace isomer;

struct Arguments {
  std::int64_t seq = 512, batch = 4;
  int steps = 5;
  DType dtype = DType::f32;
  std::string only, json_file;  // only: a model's name
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--seq") a.seq = std::stoll(value);
    if (option == "--batch") a.batch = std::stoll(value);
    if (option == "--steps") a.steps = std::stoi(value);
    if (option == "--dtype") a.dtype = value == "bf16" ? DType::bf16 : DType::f32;
    if (option == "--only") a.only = value;
    if (option == "--json") a.json_file = value;
  }
  return a;
}

/// tiny-mla without experts: its SwiGLU as wide as eight experts and the shared one together.
ModelConfig dense_config() {
  ModelConfig config = load_model_config("tiny-mla");
  config.name = "dense";
  config.intermediate_size =
      config.moe.moe_intermediate_size * (config.moe.n_routed_experts + config.moe.n_shared_experts);
  config.moe = {};
  return config;
}

std::vector<Sample> samples_of(const Arguments& a) {
  const std::vector<std::int64_t> bytes = byte_tokens(default_text(), static_cast<std::size_t>(a.seq * a.batch + 1));
  std::vector<Sample> samples;
  for (std::int64_t b = 0; b < a.batch; ++b) {
    Sample sample;
    for (std::int64_t t = 0; t < a.seq; ++t) {
      sample.ids.push_back(static_cast<std::int32_t>(bytes[static_cast<std::size_t>(b * a.seq + t)]));
      sample.targets.push_back(static_cast<std::int32_t>(bytes[static_cast<std::size_t>(b * a.seq + t + 1)]));
      sample.segments.push_back(0);
      sample.positions.push_back(static_cast<std::int32_t>(t));
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

struct Operation {
  double seconds = 0, flops = 0;  // processor time; of all ranks, a step
};

struct Result {
  std::vector<double> losses;
  double wall_s = 0;     // a step: median
  double fastest_s = 0;  // a step: the fastest
  double cpu_s = 0;      // a step, all ranks
  double busiest_s = 0;  // a step: processor time of the rank that works longest
  double flops = 0;      // a step, all ranks
  std::map<std::string, Operation> operations;
};

/// What one rank does in a step: as the trainer, without data, reports and checkpoints.
double train_step(RankContext& ctx, const Arguments& a, LanguageModel& model, Parameters& parameters,
                  const std::vector<Sample>& samples, std::int64_t step) {
  const double scale = 1.0 / static_cast<double>(a.seq * a.batch);
  std::fill_n(parameters.gradient.data<float>(), parameters.gradient.numel(), 0.0F);
  const double loss = model.forward_backward(ctx, parameters, samples, scale).loss_sum * scale;
  model.sync_gradients(ctx, parameters);
  adamw_step(ctx, parameters, {}, step, 1e-3, gradient_norm(ctx, parameters));
  parameters.refresh(ctx);
  return loss;
}

void add_operations(RankContext& ctx, int steps, Result& result) {
  for (const auto& [key, summary] : ctx.ops().summaries()) {
    Operation& operation = result.operations[fmt::format("{} {}", name_of(key.phase), key.name)];
    operation.seconds += summary.cpu_s / steps;
    operation.flops += summary.cost.flops / steps;
    result.flops += summary.cost.flops / steps;
  }
}

Result measure(const Arguments& a, const ModelConfig& config, const std::string& layout, int ranks) {
  constexpr int kWarmUp = 2;
  const std::vector<Sample> samples = samples_of(a);
  Result result{.losses = std::vector<double>(static_cast<std::size_t>(kWarmUp + a.steps))};
  std::vector<double> walls;
  std::mutex mutex;
  GroupOptions group;
  group.num_ranks = ranks;
  group.threads_per_rank = 1;
  run_group(group, [&](RankContext& ctx) {
    Parameters parameters(ctx, config, a.dtype);
    parameters.set(initial_model_weights(config, 1, DType::f32));
    parameters.refresh(ctx);
    LanguageModel model(ctx, {.config = config,
                              .layout = sized_layout(parse_layout(layout), ranks),
                              .dtype = a.dtype,
                              .seq = a.seq,
                              .batch = a.batch});
    double cpu_begin = 0;
    for (int step = 0; step < kWarmUp + a.steps; ++step) {
      if (step == kWarmUp) {
        ctx.ops().clear();
        cpu_begin = thread_cpu_s();
      }
      ctx.comm().barrier();
      const double begin = wall_clock_s();
      const double loss = train_step(ctx, a, model, parameters, samples, step);
      ctx.comm().barrier();
      const std::lock_guard lock(mutex);
      if (ctx.rank() == 0 && step >= kWarmUp) walls.push_back(wall_clock_s() - begin);
      result.losses[static_cast<std::size_t>(step)] += loss;
    }
    const std::lock_guard lock(mutex);
    const double cpu = (thread_cpu_s() - cpu_begin) / a.steps;
    result.cpu_s += cpu;
    result.busiest_s = std::max(result.busiest_s, cpu);
    add_operations(ctx, a.steps, result);
  });
  std::sort(walls.begin(), walls.end());
  result.wall_s = walls[walls.size() / 2];
  result.fastest_s = walls.front();
  return result;
}

void check(const std::string& name, const Result& result, const Result& reference, DType dtype) {
  const double bound = dtype == DType::bf16 ? 2e-2 : 1e-5;
  const double difference = std::abs(result.losses.front() / reference.losses.front() - 1);
  if (!(difference <= bound)) throw Error(fmt::format("{}: the first loss differs from one rank's", name));
  if (!(result.losses.back() < result.losses.front())) throw Error(fmt::format("{}: the loss does not fall", name));
}

void print_operations(const Result& r, double peak) {
  std::vector<std::pair<std::string, Operation>> ops(r.operations.begin(), r.operations.end());
  std::sort(ops.begin(), ops.end(), [](const auto& x, const auto& y) { return x.second.seconds > y.second.seconds; });
  double listed = 0;
  fmt::print("\n{:<44} {:>9} {:>9} {:>9}\n", "operation", "ms a step", "of step", "of peak");
  for (std::size_t i = 0; i < ops.size() && i < 10; ++i) {
    const auto& [name, op] = ops[i];
    listed += op.seconds;
    fmt::print("{:<44} {:>9.2f} {:>8.1f}% {:>8.1f}%\n", name, 1e3 * op.seconds, 100 * op.seconds / r.cpu_s,
               100 * op.flops / op.seconds / peak);
  }
  double all = 0;
  for (const auto& [name, op] : ops) all += op.seconds;
  fmt::print("{:<44} {:>9.2f} {:>8.1f}%\n", "all other operations", 1e3 * (all - listed),
             100 * (all - listed) / r.cpu_s);
  fmt::print("{:<44} {:>9.2f} {:>8.1f}%\n\n", "outside operations", 1e3 * (r.cpu_s - all),
             100 * (r.cpu_s - all) / r.cpu_s);
}

nlohmann::json report(const Arguments& a, const std::string& name, int ranks, const Result& r, double peak) {
  const double tokens = static_cast<double>(a.seq * a.batch);
  fmt::print(
      "{:<28} {:>2} ranks  {:>8.1f} ms (fastest {:.1f})  {:>7.0f} tokens/s  {:>5.1f} % of the peak by processor "
      "time, {:.1f} % by wall; busiest rank {:.1f} ms\n",
      name, ranks, 1e3 * r.wall_s, 1e3 * r.fastest_s, tokens / r.wall_s, 100 * r.flops / (r.cpu_s * peak),
      100 * r.flops / (r.wall_s * ranks * peak), 1e3 * r.busiest_s);
  return {{"name", name},
          {"ranks", ranks},
          {"seconds", r.wall_s},
          {"fastest_seconds", r.fastest_s},
          {"cpu_seconds", r.cpu_s},
          {"busiest_rank_cpu_seconds", r.busiest_s},
          {"flops", r.flops},
          {"tokens_per_s", tokens / r.wall_s},
          {"peak_share_cpu", r.flops / (r.cpu_s * peak)},
          {"peak_share_wall", r.flops / (r.wall_s * ranks * peak)}};
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  const double peak = 1e9 * fma_peak_gflops(a.dtype);
  fmt::print("{} sequences of {} tokens, {}, one thread a rank; {}; multiply-add peak {:.1f} GFLOP/s a core\n\n",
             a.batch, a.seq, name_of(a.dtype), processor_name(), peak / 1e9);
  nlohmann::json json = machine_json(1, 1);
  json.update({{"command", "bench_train_step"},
               {"seq", a.seq},
               {"batch", a.batch},
               {"dtype", name_of(a.dtype)},
               {"peak_flops", peak},
               {"runs", nlohmann::json::array()}});
  for (const ModelConfig& config : {dense_config(), load_model_config("tiny-mla")}) {
    if (!a.only.empty() && a.only != config.name) continue;
    const Result one = measure(a, config, "explicit", 1);
    check(config.name, one, one, a.dtype);
    json["runs"].push_back(report(a, config.name + ", explicit", 1, one, peak));
    print_operations(one, peak);
    for (const char* layout : {"explicit", "absorbed", "laga", "ring", "latent-gather", "latent-ring"}) {
      const Result two = measure(a, config, layout, 2);
      check(fmt::format("{}, {}", config.name, layout), two, one, a.dtype);
      json["runs"].push_back(report(a, fmt::format("{}, {}", config.name, layout), 2, two, peak));
      fmt::print("{:<28} scaling: {:.2f}× by wall, {:.2f}× by the busiest rank's processor time\n", "",
                 one.wall_s / two.wall_s, one.cpu_s / two.busiest_s);
    }
    fmt::print("\n");
  }
  if (!a.json_file.empty()) std::ofstream(a.json_file) << json.dump(2) << "\n";
  return 0;
}
