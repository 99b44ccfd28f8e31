// isomer plan decode: the best ways to spread decoding over devices that are not here.
#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/isomer/plan_output.h"
#include "apps/isomer/plan_search_commands.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "plan/decode_report.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxContext = std::int64_t{1} << 30;
constexpr int kMaxDevices = kMaxDecodeDevices;
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 24;

/// The options as typed.
struct DecodeArguments {
  std::string model = "deepseek-r1", hardware = "gb200-nvl72", context = "128K", precision = "bf16";
  std::string cache, exchange, ttl, batches, memory, layouts, link_latency, link_bandwidth;
  PlanFiles files;
  int max_devices = 0, nodes = 0;
  double contention = 1, fp4_efficiency = 1;
  bool include_inexact = false, roofline = false, no_sensitivity = false;
};

Precision parse_precision(const std::string& option, const std::string& text) {
  if (text == "bf16") return Precision::bf16;
  if (text == "fp8") return Precision::fp8;
  if (text == "fp4" || text == "nvfp4") return Precision::nvfp4;
  invalid_argument("{} '{}': it takes bf16, fp8 or fp4", option, text);
}

/// --max-devices, --nodes × devices a node, or as far as the fastest links reach, up to 64.
int max_devices_of(const DecodeArguments& a, const Hardware& hardware) {
  if (a.max_devices != 0 && a.nodes != 0) invalid_argument("--max-devices and --nodes: give one of them");
  const int node = hardware.tiers.empty() ? 1 : hardware.tiers.front().devices;
  if (a.nodes < 0 || a.nodes > kMaxDevices / node) {
    invalid_argument("--nodes {}: must lie between 1 and {} ({} devices each)", a.nodes, kMaxDevices / node, node);
  }
  int devices = a.nodes > 0 ? a.nodes * node : a.max_devices;
  if (devices == 0) devices = std::min(64, node);
  if (devices < 1 || devices > kMaxDevices) {
    invalid_argument("--max-devices {}: must lie between 1 and {}", devices, kMaxDevices);
  }
  check_reach("--max-devices: ", devices, hardware);
  return devices;
}

Assumptions assumptions_of(const DecodeArguments& a, const Hardware& hardware) {
  Assumptions assumptions{
      .fp4_efficiency = a.fp4_efficiency, .overlap_contention = a.contention, .roofline = a.roofline};
  if (!a.link_latency.empty())
    assumptions.link_latency_s = parse_seconds("--link-latency", a.link_latency, 0, kMaxLinkLatency_s);
  if (!a.link_bandwidth.empty()) {
    const double wanted = parse_bandwidth("--link-bandwidth", a.link_bandwidth, kMinLinkBandwidth, kMaxLinkBandwidth);
    if (hardware.tiers.empty()) invalid_argument("--link-bandwidth: {} has no links", hardware.name);
    assumptions.link_bandwidth_factor = wanted / hardware.tiers.front().bandwidth_bytes_per_s;
  }
  return assumptions;
}

std::vector<std::int64_t> batches_of(const std::string& text) {
  std::vector<std::int64_t> batches;
  std::stringstream list(text);
  for (std::string one; std::getline(list, one, ',');) batches.push_back(parse_count("--batch", one, 1, kMaxBatch));
  std::sort(batches.begin(), batches.end());
  batches.erase(std::unique(batches.begin(), batches.end()), batches.end());
  return batches;
}

DecodePlanOptions options_of(const DecodeArguments& a) {
  DecodePlanOptions o{.hardware = load_hardware(a.hardware)};
  o.problem.config = load_model_config(a.model);
  o.problem.context = parse_count("--context", a.context, 1, kMaxContext);
  auto& precision = o.problem.precision;
  precision.weights = parse_precision("--precision", a.precision);
  precision.cache = precision.weights == Precision::bf16 ? Precision::bf16 : Precision::fp8;
  if (!a.cache.empty()) precision.cache = parse_precision("--cache", a.cache);
  if (!a.exchange.empty()) precision.activations = parse_precision("--exchange", a.exchange);
  if (!a.memory.empty()) o.problem.memory_limit_bytes = parse_bytes("--memory", a.memory, kMinMemory, kMaxMemory);
  if (!a.ttl.empty()) o.ttl_s = parse_seconds("--ttl", a.ttl, kMinTtl_s, kMaxTtl_s);
  o.assumptions = assumptions_of(a, o.hardware);
  o.search.max_devices = max_devices_of(a, o.hardware);
  o.search.include_inexact = a.include_inexact;
  o.search.batches = batches_of(a.batches);
  std::stringstream list(a.layouts);
  for (std::string one; std::getline(list, one, ';');) {
    const DecodeLayout layout = parse_decode_layout(one, o.problem.config);
    const auto known = [&](const DecodeLayout& other) { return to_string(other) == to_string(layout); };
    if (std::any_of(o.search.layouts.begin(), o.search.layouts.end(), known)) {
      invalid_argument("--layouts: {} is named twice; name it once", to_string(layout));
    }
    o.search.layouts.push_back(layout);
    if (layout.devices() > o.search.max_devices) {
      invalid_argument("--layouts: {} takes {} devices, there are {}; raise --max-devices", to_string(layout),
                       layout.devices(), o.search.max_devices);
    }
  }
  o.sensitivity = !a.no_sensitivity;
  return o;
}

void print_title(const DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  const bool rounded = o.search.layouts.empty() && !std::has_single_bit(static_cast<unsigned>(o.search.max_devices));
  fmt::print("{} on {}: decoding at {} tokens of context, up to {} devices{}\n", o.problem.config.name, o.hardware.name,
             tokens_text(o.problem.context), o.search.max_devices,
             rounded ? " (sizes in powers of two; --layouts names others)" : "");
  fmt::print("  weights {}, cache {}, exchanged in {}; {}\n{}{}", name_of(o.problem.precision.weights),
             name_of(o.problem.precision.cache), name_of(o.problem.precision.activations),
             efficiency_text(o.hardware, o.assumptions.roofline, plan.stand_ins),
             assumed_text(o.assumptions, o.problem.memory_limit_bytes),
             positions_note(o.problem.config, o.problem.context));
  fmt::print("  {} configurations examined, {} priced in {:.2f} s on one core\n", plan.search.examined,
             plan.search.points.size(), plan.search.seconds);
  for (int i = 1; i < kNumUnfit; ++i) {
    const auto count = plan.search.unfit[static_cast<std::size_t>(i)];
    if (count > 0) fmt::print("  {} left out: {}\n", count, reason_of(static_cast<Unfit>(i)));
  }
}

std::vector<std::string> point_cells(const DecodePlan& plan, const DecodePoint& p) {
  return {to_string(plan.search.layout_of(p)), fmt::format("{}", p.devices),
          fmt::format("{}", p.batch),          format_seconds(p.step_s),
          fmt::format("{:.1f}", p.per_user()), fmt::format("{:.1f}", p.per_device())};
}

void print_frontier(const DecodePlan& plan) {
  constexpr std::size_t kRows = 14;
  fmt::print("\nPareto frontier of exact layouts ({} points{})\n", plan.overall.size(),
             plan.overall.size() > kRows ? fmt::format(", {} of them evenly chosen", kRows) : "");
  Table table({"layout", "devices", "batch", "a token", "tokens/s/user", "tokens/s/device"});
  const std::size_t count = std::min(kRows, plan.overall.size());
  for (std::size_t i = 0; i < count; ++i) {
    table.add(point_cells(plan, plan.overall[count > 1 ? i * (plan.overall.size() - 1) / (count - 1) : 0]));
  }
  fmt::print("{}", table.text());

  fmt::print("\nBest of each family\n");
  Table families({"family", "quickest", "tokens/s/user", "most throughput", "tokens/s/device", "exact"});
  for (const FamilyFrontier& f : plan.frontiers) {
    const DecodePoint &fast = f.points.front(), &wide = f.points.back();
    families.add({f.family, to_string(plan.search.layout_of(fast)), fmt::format("{:.1f}", fast.per_user()),
                  to_string(plan.search.layout_of(wide)), fmt::format("{:.1f}", wide.per_device()),
                  f.exact ? "yes" : "no"});
  }
  fmt::print("{}", families.text());
}

void print_chosen(const DecodePlan& plan) {
  for (const ChosenLayout& c : plan.chosen) {
    fmt::print("\n{}: {} at batch {} on {} devices\n", c.question, c.layout, c.point.batch, c.point.devices);
    fmt::print("  {} a token, {:.1f} tokens/s/user, {:.1f} tokens/s/device; bound by {}\n",
               format_seconds(c.point.step_s), c.point.per_user(), c.point.per_device(), c.bound);
    fmt::print("  time: {}\n", parts_text(shares_of(c.time)));
    fmt::print("  memory of a device: weights {}, cache {}, workspace {}\n", format_bytes(c.memory.weights),
               format_bytes(c.memory.cache), format_bytes(c.memory.workspace));
    if (c.next) {
      fmt::print("  next: {} at batch {}, {} a token, {:.1f} tokens/s/device; loses on {}\n", c.next_layout,
                 c.next->point.batch, format_seconds(c.next->point.step_s), c.next->point.per_device(), c.next->why);
    }
  }
  const ChosenLayout& first = plan.chosen.front();
  fmt::print("\nLongest operations of {}\n", first.layout);
  fmt::print("{}", operations_text(first.operations));
}

void print_sensitivity(const Sensitivity& s) {
  fmt::print("\nHelix against the best of TP, PP, EP, DP attention and Medha\n");
  fmt::print(
      "  quickest layout {:.2f}× ({:.2f} to {:.2f}); throughput within the same time a token up to {:.2f}× ({:.2f} to "
      "{:.2f}), at {}\n",
      s.base.interactivity, s.lowest.interactivity, s.highest.interactivity, s.base.throughput, s.lowest.throughput,
      s.highest.throughput, format_seconds(s.base.at_step_s));
  Table table(
      {"assumption, what matters most first", "from", "quickest", "throughput", "to", "quickest", "throughput"});
  for (const SensitivityRow& row : s.rows) {
    std::vector<std::string> cells = {row.assumption};
    for (const AssumedEnd& end : row.ends) {
      cells.push_back(end.value);
      cells.push_back(fmt::format("{:.2f}", end.ratios.interactivity));
      cells.push_back(fmt::format("{:.2f}", end.ratios.throughput));
    }
    table.add(std::move(cells));
  }
  fmt::print("{}", table.text());
}

int run_decode(const DecodeArguments& a) {
  a.files.check();
  DecodePlanOptions options = options_of(a);
  const DecodePlan plan = [&] {
    Progress progress;
    options.progress = [&](const std::string& what) { progress.show(what); };
    return plan_decode(options);
  }();
  print_title(plan);
  print_frontier(plan);
  print_chosen(plan);
  if (plan.sensitivity) print_sensitivity(*plan.sensitivity);
  fmt::print("\nPredictions of a model of the hardware, not measurements (docs/planner.md).\n");
  a.files.write(to_json(plan));
  return 0;
}

}  // namespace

void add_plan_decode(CLI::App& plan, int& exit_code) {
  CLI::App* command = plan.add_subcommand("decode", "the best layouts for decoding, and what limits each");
  auto a = std::make_shared<DecodeArguments>();
  command->add_option("--model", a->model, "a built-in name, a checkpoint's directory, or a config.json")
      ->capture_default_str();
  command->add_option("--hardware", a->hardware, "a built-in name or a hardware file")->capture_default_str();
  command->add_option("--context", a->context, "cached tokens a sequence (128K, 1M)")->capture_default_str();
  command->add_option("--max-devices", a->max_devices, "of one copy of the model (default: its fast links', up to 64)")
      ->check(CLI::Range(1, kMaxDevices));
  command->add_option("--nodes", a->nodes, "the same, in groups of devices that share the fastest links")
      ->check(CLI::Range(1, kMaxDevices));
  command->add_option("--precision", a->precision, "of weights: bf16, fp8, fp4")->capture_default_str();
  command->add_option("--cache", a->cache, "of the cache (default: bf16 for bf16 weights, else fp8)");
  command->add_option("--exchange", a->exchange, "of what travels between devices (default bf16)");
  command->add_option("--batch", a->batches, "sequences decoded together, separated by commas (default: 1 to 64K)");
  command->add_option("--ttl", a->ttl, "longest time a token of a sequence may take (25ms)");
  command->add_option("--memory", a->memory, "memory of a device (80GB) instead of the description's");
  command->add_option("--layouts", a->layouts, "only these, separated by semicolons (\"tp:8;helix:kvp=8,tpa=1\")");
  command->add_flag("--include-inexact", a->include_inexact, "look at TPLA as well; it is not chosen");
  command->add_flag("--roofline", a->roofline, "peak rates alone, as published analyses have it");
  command->add_option("--link-latency", a->link_latency, "of every link (5us) instead of the description's");
  command->add_option("--link-bandwidth", a->link_bandwidth, "of the fastest links (900GB/s), others in proportion");
  command->add_option("--contention", a->contention, "how many times as long overlapped work takes (1 to 2)")
      ->check(CLI::Range(1.0, 2.0));
  command->add_option("--fp4-efficiency", a->fp4_efficiency, "share of the FP4 rate that is reached")
      ->check(CLI::Range(0.01, 1.0));
  command->add_flag("--no-sensitivity", a->no_sensitivity, "leave out the study of assumptions");
  command->add_option("--json", a->files.json, "write the plan as JSON");
  command->add_option("--html", a->files.html, "write the plan as one HTML page that needs no network");
  command->callback([a, &exit_code] { exit_code = run_decode(*a); });
}

}  // namespace isomer
