// isomer plan train: sequence-parallel schemes among data, tensor, expert and pipeline parallelism, on devices that are
// not here.
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "apps/isomer/plan_output.h"
#include "apps/isomer/plan_search_commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "plan/train_report.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxSeq = std::int64_t{1} << 30;
constexpr int kMaxDevices = kMaxTrainDevices;

struct TrainArguments {
  std::string model = "deepseek-v3", hardware = "h100", seq = "128K", batch = "64", schemes = "all";
  std::string optimizer = "f32", memory, link_latency, link_bandwidth;
  PlanFiles files;
  double overlap = 0, kernel_efficiency = 1;
  int nodes = 0, devices = 0;
  bool roofline = false, no_sensitivity = false;
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
  check_reach("", devices, hardware);
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
    if (std::find(chosen.begin(), chosen.end(), *found) == chosen.end()) chosen.push_back(*found);
  }
  return chosen;
}

TrainPlanOptions options_of(const TrainArguments& a) {
  TrainPlanOptions o{.hardware = load_hardware(a.hardware)};
  o.problem.config = load_model_config(a.model);
  o.problem.seq = parse_count("--seq", a.seq, 1, kMaxSeq);
  o.problem.batch = parse_count("--batch", a.batch, 1, 1 << 24);
  if (a.optimizer == "bf16") o.problem.optimizer_bytes = 8;
  if (!a.memory.empty()) o.problem.memory_limit_bytes = parse_bytes("--memory", a.memory, kMinMemory, kMaxMemory);
  o.devices = devices_of(a, o.hardware);
  o.schemes = schemes_of(a.schemes, o.problem.config.attention);
  o.assumptions.roofline = a.roofline;
  o.assumptions.link_overlap = a.overlap;
  o.assumptions.kernel_efficiency = a.kernel_efficiency;
  o.sensitivity = !a.no_sensitivity;
  if (!a.link_latency.empty())
    o.assumptions.link_latency_s = parse_seconds("--link-latency", a.link_latency, 0, kMaxLinkLatency_s);
  if (!a.link_bandwidth.empty()) {
    if (o.hardware.tiers.empty()) invalid_argument("--link-bandwidth: {} has no links", o.hardware.name);
    o.assumptions.link_bandwidth_factor =
        parse_bandwidth("--link-bandwidth", a.link_bandwidth, kMinLinkBandwidth, kMaxLinkBandwidth) /
        o.hardware.tiers.front().bandwidth_bytes_per_s;
  }
  return o;
}

void print_title(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  fmt::print("{} on {} × {}: {} sequences of {} tokens a step\n", o.problem.config.name, o.devices, o.hardware.name,
             o.problem.batch, tokens_text(o.problem.seq));
  fmt::print("  {}\n{}{}", efficiency_text(o.hardware, o.assumptions.roofline, plan.stand_ins),
             assumed_text(o.assumptions, o.problem.memory_limit_bytes),
             positions_note(o.problem.config, o.problem.seq));
  fmt::print("  {} layouts examined, {} priced in {:.2f} s on one core\n", plan.search.examined,
             plan.search.points.size(), plan.search.seconds);
  for (int i = 1; i < kNumTrainUnfit; ++i) {
    const auto count = plan.search.unfit[static_cast<std::size_t>(i)];
    if (count > 0) fmt::print("  {} left out: {}\n", count, reason_of(static_cast<TrainUnfit>(i)));
  }
}

void print_choices(const TrainPlan& plan, const char* title, const std::vector<TrainChoice>& choices) {
  fmt::print("\n{}\n", title);
  Table table({"layout", "a step", "tokens/s/device", "MFU", "memory", "sent, attention block", "saved", "executed"});
  for (const TrainChoice& c : choices) {
    table.add({to_string(c.layout), format_seconds(c.point.step_s),
               fmt::format("{:.0f}", tokens_per_s_per_device(plan, c.point)),
               fmt::format("{:.0f} %", 100 * c.utilisation), format_bytes(c.memory.total()),
               format_bytes(static_cast<double>(c.attention.sent.total())),
               format_bytes(static_cast<double>(c.attention.work.saved_bytes)),
               c.layout.priced_not_executed() ? "in part" : "yes"});
  }
  fmt::print("{}", table.text());
}

/// A row a family, a column for every number of ranks that a sequence lies on.
void print_by_ranks(const TrainPlan& plan) {
  std::set<int> sizes;
  for (const TrainFamily& family : plan.by_ranks) {
    for (const TrainPoint& point : family.points) sizes.insert(plan.search.layout_of(point).sequence_ranks());
  }
  fmt::print("\nTokens/s/device of the quickest layout, by scheme and ranks that a sequence lies on; * a baseline\n");
  std::vector<std::string> header = {"scheme"};
  for (const int size : sizes) header.push_back(fmt::format("{}", size));
  Table table(header);
  for (const TrainFamily& family : plan.by_ranks) {
    std::vector<std::string> row = {family.family + (family.baseline ? " *" : "")};
    auto point = family.points.begin();
    for (const int size : sizes) {
      const bool here = point != family.points.end() && plan.search.layout_of(*point).sequence_ranks() == size;
      row.push_back(here ? fmt::format("{:.0f}", tokens_per_s_per_device(plan, *point)) : "-");
      if (here) ++point;
    }
    table.add(std::move(row));
  }
  fmt::print("{}", table.text());
}

/// The parts of a step; those that no executor is held to in brackets.
std::string marked_parts(const TrainChoice& c) {
  std::vector<StepShare> executed, priced;
  for (const StepShare& share : shares_of(c.time)) {
    (is_held_to_executor(share.name, c.layout) ? executed : priced).push_back(share);
  }
  return fmt::format("{}; priced, not executed: {}", parts_text(executed), parts_text(priced));
}

void print_chosen(const TrainPlan& plan) {
  for (const TrainAnswer& a : plan.chosen) {
    const TrainMemory& m = a.choice.memory;
    fmt::print("\n{}: {}\n", a.question, to_string(a.choice.layout));
    fmt::print("  {} a step, {:.1f} tokens/s/device, MFU {:.0f} %; bound by {}\n",
               format_seconds(a.choice.point.step_s), tokens_per_s_per_device(plan, a.choice.point),
               100 * a.choice.utilisation, a.bound);
    fmt::print("  time: {}\n", marked_parts(a.choice));
    fmt::print("  memory of a device: weights {}, gradients {}, optimiser {}, saved {}, beside them {}\n",
               format_bytes(m.weights), format_bytes(m.gradients), format_bytes(m.optimizer), format_bytes(m.saved),
               format_bytes(m.transient));
    if (a.next) {
      fmt::print("  next: {}, {} a step, {}; loses on {}\n", to_string(a.next->layout),
                 format_seconds(a.next->point.step_s), format_bytes(a.next->point.memory_bytes), a.next_loses_on);
    }
  }
  fmt::print("\nLongest operations of {}\n{}", to_string(plan.chosen.front().choice.layout),
             operations_text(plan.chosen.front().operations));
}

void print_sensitivity(const TrainSensitivity& s) {
  fmt::print("\nA step of the quickest layout: {} ({} to {}), which depends most on: {}\n",
             format_seconds(s.step_s.base), format_seconds(s.step_s.lowest), format_seconds(s.step_s.highest),
             s.step_depends_on);
  const bool ratio = !s.ours.empty();
  if (ratio) {
    fmt::print("{} against the best baseline, {}: {:.3f}× ({:.3f} to {:.3f}), the best of both chosen anew\n", s.ours,
               s.theirs, s.ratio.base, s.ratio.lowest, s.ratio.highest);
  }
  Table table(ratio
                  ? std::vector<std::string>{"assumption, what moves the ratio most first", "from", "a step", "ratio",
                                             "to", "a step", "ratio"}
                  : std::vector<std::string>{"assumption, what matters most first", "from", "a step", "to", "a step"});
  for (const TrainRange& row : s.rows) {
    std::vector<std::string> cells = {row.assumption};
    for (const TrainEnd& end : row.ends) {
      cells.push_back(end.value);
      cells.push_back(format_seconds(end.quickest_s()));
      if (ratio) cells.push_back(fmt::format("{:.3f}", s.ratio_at(end)));
    }
    table.add(std::move(cells));
  }
  fmt::print("{}", table.text());

  fmt::print("\nTimes as long as the quickest layout, the best of each scheme chosen anew\n");
  Table behind({"scheme", "as described", "lowest", "highest"});
  for (const TrainBehind& b : s.behind) {
    behind.add({b.family, fmt::format("{:.3f}", b.times.base), fmt::format("{:.3f}", b.times.lowest),
                fmt::format("{:.3f}", b.times.highest)});
  }
  fmt::print("{}", behind.text());
}

int run_train(const TrainArguments& a) {
  a.files.check();
  TrainPlanOptions options = options_of(a);
  const TrainPlan plan = [&] {
    Progress progress;
    options.progress = [&](const std::string& what) { progress.show(what); };
    return plan_train(options);
  }();
  print_title(plan);
  print_choices(plan, "Quickest", plan.best);
  if (!plan.by_scheme.empty()) print_choices(plan, "Best of each sequence-parallel scheme", plan.by_scheme);
  print_by_ranks(plan);
  print_chosen(plan);
  if (plan.sensitivity) print_sensitivity(*plan.sensitivity);
  fmt::print(
      "\nsent, saved: of one attention block and sequence, what a dry run of the scheme counts. Priced, not executed: "
      "TP,\n"
      "EP, PP, ZeRO, recompute=all and everything outside attention; links run beside nothing unless --overlap says "
      "so.\n"
      "MFU: the model's FLOPs, forward and twice that backward, over what all devices do at peak; what is computed "
      "again, under\n"
      "recompute or in a fused attention's backward, takes time and counts as no FLOPs.\n"
      "Predictions of a model of the hardware, not measurements (docs/planner.md).\n");
  a.files.write(to_json(plan));
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
  command->add_option("--overlap", a->overlap, "share of the links' time that runs beside kernels (0 to 1)")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--kernel-efficiency", a->kernel_efficiency, "times the kernels' fitted speed")
      ->check(CLI::Range(0.01, 100.0));
  command->add_flag("--no-sensitivity", a->no_sensitivity, "leave out the study of assumptions");
  command->add_option("--json", a->files.json, "write the plan as JSON");
  command->add_option("--html", a->files.html, "write the plan as one HTML page that needs no network");
  command->callback([a, &exit_code] { exit_code = run_train(*a); });
}

}  // namespace isomer
