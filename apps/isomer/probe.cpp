// isomer probe: this machine as a hardware file for the planner.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/commands.h"
#include "apps/isomer/output_file.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/error.h"
#include "model/json_text.h"
#include "plan/doubts.h"
#include "plan/hardware_json.h"
#include "study/machine.h"
#include "study/probe.h"

namespace isomer {

namespace {

using nlohmann::json;

struct Options {
  std::string out, json_path;
  ProbeOptions probe;
};

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

void print(const ProbeResult& result, const Hardware& hardware) {
  fmt::print("{}\n", hardware.description);
  fmt::print("  reads        {}/s\n", format_bytes(hardware.memory_bandwidth_bytes_per_s));
  fmt::print("  products     {:.1f} GFLOP/s f32, {:.1f} GFLOP/s bf16\n",
             hardware.peak_flops_per_s(Precision::f32) / 1e9, hardware.peak_flops_per_s(Precision::bf16) / 1e9);
  for (const LinkTier& tier : hardware.tiers) {
    fmt::print("  {} ranks      {} latency, {}/s\n", tier.devices, format_seconds(tier.latency_s),
               format_bytes(tier.bandwidth_bytes_per_s));
  }
  Table table({"operation", "shapes", "share of peak", "share of bytes", "mean error", "held back", "mean", "p95"});
  for (const Curve& curve : result.curves) {
    const bool collective = is_collective(curve.kind) || curve.kind == OperationKind::elementwise;
    table.add({curve.label(), fmt::format("{}", curve.used.rows), collective ? "–" : percent(curve.compute_share),
               percent(curve.bytes_share), percent(curve.used.mean), fmt::format("{}", curve.held_back.rows),
               percent(curve.held_back.mean), percent(curve.held_back.p95)});
  }
  fmt::print("\n{}\n", table.text());
}

json report(const ProbeResult& result, const Options& options, double seconds) {
  json out = machine_json(options.probe.threads_per_rank, 0);
  out["command"] = "probe";
  out["out"] = options.out;
  out["ranks"] = options.probe.num_ranks;
  out["seconds"] = seconds;
  out["shapes"] = result.num_shapes;
  out["not_fitted"] = result.not_fitted;
  out["hardware"] = result.hardware;
  return out;
}

void run(const Options& options) {
  check_output_file("--out", options.out);
  check_output_file("--json", options.json_path);
  check_different_files("--out", options.out, "--json", options.json_path);
  const double begin_s = wall_clock_s();
  const ProbeResult result = [&] {
    Progress progress;
    ProbeOptions probe = options.probe;
    probe.progress = [&](const std::string& text) { progress.show(text); };
    return probe_machine(probe);
  }();
  const std::string text = hardware_text(result.hardware);
  const Hardware hardware = parse_hardware(parse_json(text, options.out), options.out);
  write_output_file("--out", options.out, text);
  print(result, hardware);
  const double seconds = wall_clock_s() - begin_s;
  fmt::print("{} shapes in {:.0f} s; wrote {}\n", result.num_shapes, seconds, options.out);
  for (const auto& doubt : doubtful_fits(result.curves)) {
    fmt::print("warning: {}; other programs beside the probe do that, too: probe again on a quiet machine\n", doubt);
  }
  if (!options.json_path.empty()) write_output_file("--json", options.json_path, report(result, options, seconds));
}

}  // namespace

void add_probe(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  auto* command = app.add_subcommand("probe", "measures this machine into a hardware file for plan");
  command->add_option("--out", options->out, "hardware file to write")->required();
  command->add_option("--ranks", options->probe.num_ranks, "ranks that exchange messages (default 2)");
  command->add_option("--threads", options->probe.threads_per_rank, "threads of a rank (default 1)");
  command->add_option("--json", options->json_path, "write the same as JSON to this file");
  command->callback([options, &exit_code] {
    run(*options);
    exit_code = 0;
  });
}

}  // namespace isomer
