// isomer plan train: sequence-parallel schemes among data, tensor, expert and pipeline parallelism, on devices that are
// not here.
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/isomer/plan_search_commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "plan/train_search.h"
#include "study/machine.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxSeq = std::int64_t{1} << 30;
constexpr int kMaxDevices = 65536;

struct TrainArguments {
  std::string model = "deepseek-v3", hardware = "h100", seq = "128K", batch = "64", schemes = "all";
  std::string optimizer = "f32", memory, link_latency, link_bandwidth, json_file;
  int nodes = 0, devices = 0;
  bool roofline = false;
};

int devices_of(const TrainArguments& a, const Hardware& hardware) {
  if (a.devices != 0 && a.nodes != 0) invalid_argument("--devices and --nodes: give one of them");
  const int node = hardware.tiers.empty() ? 1 : hardware.tiers.front().devices;
  if (a.nodes < 0 || a.nodes > kMaxDevices / node) {
    invalid_argument("--nodes {}: must lie between 1 and {} ({} devices each)", a.nodes, kMaxDevices / node, node);
  }
  const int devices = a.devices != 0 ? a.devices : std::max(1, a.nodes) * node;
  if (devices < 1 || devices > kMaxDevices) {
    invalid_argument("--devices {}: must lie between 1 and {}", devices, kMaxDevices);
  }
  if (devices > hardware.max_devices()) {
    invalid_argument("{} devices: the links of {} reach {}", devices, hardware.name, hardware.max_devices());
  }
  return devices;
}

std::vector<std::string_view> schemes_of(const std::string& text, AttentionKind kind) {
  if (text == "all") return schemes_with_work(kind);
  std::vector<std::string_view> chosen;
  std::stringstream list(text);
  for (std::string one; std::getline(list, one, ';');) {
    const auto& known = schemes_with_work(kind);
    const auto found = std::find(known.begin(), known.end(), one);
    if (found == known.end()) {
      invalid_argument("--schemes '{}': priced are {}", one, fmt::join(known, "; "));
    }
    chosen.push_back(*found);
  }
  return chosen;
}

TrainPlanOptions options_of(const TrainArguments& a) {
  TrainPlanOptions o{.hardware = load_hardware(a.hardware)};
  o.problem.config = load_model_config(a.model);
  o.problem.seq = parse_count("--seq", a.seq, 1, kMaxSeq);
  o.problem.batch = parse_count("--batch", a.batch, 1, 1 << 24);
  if (a.optimizer == "bf16") o.problem.optimizer_bytes = 8;
  if (!a.memory.empty()) o.problem.memory_limit_bytes = parse_bytes("--memory", a.memory);
  o.devices = devices_of(a, o.hardware);
  o.schemes = schemes_of(a.schemes, o.problem.config.attention);
  o.assumptions.roofline = a.roofline;
  if (!a.link_latency.empty()) o.assumptions.link_latency_s = parse_seconds("--link-latency", a.link_latency);
  if (!a.link_bandwidth.empty()) {
    if (o.hardware.tiers.empty()) invalid_argument("--link-bandwidth: {} has no links", o.hardware.name);
    o.assumptions.link_bandwidth_factor =
        parse_bandwidth("--link-bandwidth", a.link_bandwidth) / o.hardware.tiers.front().bandwidth_bytes_per_s;
  }
  return o;
}

void print_choices(const TrainPlan& plan, const char* title, const std::vector<TrainChoice>& choices) {
  const double tokens = static_cast<double>(plan.options.problem.batch) * static_cast<double>(plan.options.problem.seq);
  fmt::print("\n{}\n", title);
  Table table(
      {"layout", "a step", "tokens/s/device", "of peak", "memory", "sent, attention block", "saved", "executed"});
  for (const TrainChoice& c : choices) {
    table.add({to_string(c.layout), format_seconds(c.point.step_s),
               fmt::format("{:.0f}", tokens / c.point.step_s / c.layout.devices()),
               fmt::format("{:.0f} %", 100 * c.utilisation), format_bytes(c.memory.total()),
               format_bytes(static_cast<double>(c.attention.sent.total())),
               format_bytes(static_cast<double>(c.attention.work.saved_bytes)),
               c.layout.priced_not_executed() ? "in part" : "yes"});
  }
  fmt::print("{}", table.text());
}

void print_best(const TrainPlan& plan) {
  const TrainChoice& best = plan.best.front();
  std::string parts;
  for (const StepShare& share : shares_of(best.time)) {
    if (share.seconds > 0) {
      parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", share.name, format_seconds(share.seconds));
    }
  }
  fmt::print("\n{}\n  time: {}\n", to_string(best.layout), parts);
  fmt::print("  memory: weights {}, gradients {}, optimiser {}, saved {}, beside them {}\n",
             format_bytes(best.memory.weights), format_bytes(best.memory.gradients),
             format_bytes(best.memory.optimizer), format_bytes(best.memory.saved), format_bytes(best.memory.transient));
  if (!plan.next_why.empty()) {
    fmt::print("  next: {}, {}; loses on {}\n", to_string(plan.best[1].layout),
               format_seconds(plan.best[1].point.step_s), plan.next_why);
  }
}

void print_plan(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  fmt::print("{} on {} × {}: {} sequences of {} tokens a step\n", o.problem.config.name, o.devices, o.hardware.name,
             o.problem.batch, o.problem.seq);
  fmt::print("  {} layouts examined, {} priced in {:.2f} s on one core\n", plan.examined, plan.points.size(),
             plan.seconds);
  for (int i = 1; i < kNumTrainUnfit; ++i) {
    const auto count = plan.unfit[static_cast<std::size_t>(i)];
    if (count > 0) fmt::print("  {} left out: {}\n", count, reason_of(static_cast<TrainUnfit>(i)));
  }
  print_choices(plan, "Quickest", plan.best);
  if (!plan.by_scheme.empty()) print_choices(plan, "Best of each sequence-parallel scheme", plan.by_scheme);
  print_best(plan);
  if (!plan.sensitivity.empty()) {
    fmt::print("\nTime of a step, {} over {}, the best layout of each chosen anew\n", plan.than, plan.of);
    Table table({"assumption", "value", "ratio"});
    for (const TrainRatio& r : plan.sensitivity) {
      table.add({r.assumption, r.value.empty() ? "-" : r.value, fmt::format("{:.3f}", r.ratio)});
    }
    fmt::print("{}", table.text());
  }
  fmt::print(
      "\nsent, saved: of one attention block and sequence, what a dry run of the scheme counts. Priced, not executed: "
      "TP,\n"
      "EP, PP, ZeRO, recompute=all and everything outside attention; nothing runs beside anything else "
      "(docs/planner.md).\n");
}

int run_train(const TrainArguments& a) {
  TrainPlanOptions options = options_of(a);
  const TrainPlan plan = [&] {
    Progress progress;
    options.progress = [&](const std::string& what) { progress.show(what); };
    return plan_train(options);
  }();
  print_plan(plan);
  if (!a.json_file.empty()) {
    nlohmann::json json = machine_json(1, 0);
    json.update(to_json(plan));
    std::ofstream out(a.json_file);
    out << json.dump(2) << "\n";
    out.close();
    if (!out) throw Error(fmt::format("--json {}: can't be written: {}", a.json_file, std::strerror(errno)));
  }
  return 0;
}

}  // namespace

void add_plan_train(CLI::App& plan, int& exit_code) {
  CLI::App* command = plan.add_subcommand("train", "the best layouts for training, and what limits each");
  auto a = std::make_shared<TrainArguments>();
  command->add_option("--model", a->model, "a built-in name, a checkpoint's directory, or a config.json")
      ->capture_default_str();
  command->add_option("--hardware", a->hardware, "a built-in name or a hardware file")->capture_default_str();
  command->add_option("--nodes", a->nodes, "groups of devices that share the fastest links (default 1)")
      ->check(CLI::Range(1, kMaxDevices));
  command->add_option("--devices", a->devices, "instead of --nodes")->check(CLI::Range(1, kMaxDevices));
  command->add_option("--seq", a->seq, "tokens a sequence (16K, 1M)")->capture_default_str();
  command->add_option("--batch", a->batch, "sequences a step")->capture_default_str();
  command->add_option("--schemes", a->schemes, "all, or schemes separated by semicolons")->capture_default_str();
  command->add_option("--optimizer", a->optimizer, "moments in f32 or bf16, beside a float32 master copy")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->add_option("--memory", a->memory, "memory of a device (80GB) instead of the description's");
  command->add_flag("--roofline", a->roofline, "peak rates alone");
  command->add_option("--link-latency", a->link_latency, "of every link (5us) instead of the description's");
  command->add_option("--link-bandwidth", a->link_bandwidth, "of the fastest links (900GB/s), others in proportion");
  command->add_option("--json", a->json_file, "write the plan as JSON");
  command->callback([a, &exit_code] { exit_code = run_train(*a); });
}

}  // namespace isomer
