// isomer plan validate: the committed curves against measured operations.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/plan_commands.h"
#include "apps/isomer/table.h"
#include "core/error.h"
#include "plan/doubts.h"
#include "plan/fit_report.h"
#include "study/machine.h"

namespace isomer {

namespace {

using nlohmann::json;

struct Options {
  std::string silicon, table, hardware, json_path;
  int worst = 3;
  bool extrapolate = false;
};

struct SystemReport {
  std::string hardware;
  std::vector<Validation> operations;  // pooled by kind
  std::vector<Validation> families;
  std::vector<Validation> extrapolated;  // pooled by kind; empty unless asked for
  std::vector<std::string> without_curve;
  std::vector<std::string> doubts;  // about a user's times
  bool checked() const { return !families.empty(); }
};

std::vector<Validation> pooled_by_kind(const std::vector<Validation>& families) {
  std::vector<Validation> result;
  for (int kind = 0; kind <= static_cast<int>(OperationKind::send_receive); ++kind) {
    std::vector<const Validation*> parts;
    for (const Validation& family : families) {
      if (static_cast<int>(family.kind) == kind) parts.push_back(&family);
    }
    if (!parts.empty()) result.push_back(pooled(std::string(name_of(static_cast<OperationKind>(kind))), parts));
  }
  return result;
}

SystemReport check(const std::string& name, const SampleFamilies& families, const Options& options) {
  SystemReport report{.hardware = name};
  const Hardware hardware = load_hardware(name);
  report.families = validate(hardware, families, static_cast<std::size_t>(options.worst), &report.without_curve);
  report.operations = pooled_by_kind(report.families);
  if (options.extrapolate) report.extrapolated = pooled_by_kind(isomer::extrapolate(hardware, families));
  if (!options.table.empty()) report.doubts = doubtful_times(hardware, families);
  return report;
}

bool misses_aim(const Validation& v) {
  const double aim = aimed_error(v.kind);
  return aim > 0 && v.held_back.mean > aim;
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

std::vector<std::string> row_of(const Validation& v) {
  const double aim = aimed_error(v.kind);
  const std::string aimed = aim == 0 ? "–" : percent(aim) + (misses_aim(v) ? ", missed" : "");
  return {v.label,
          fmt::format("{}", v.used.rows),
          percent(v.used.mean),
          percent(v.used.p95),
          fmt::format("{}", v.held_back.rows),
          percent(v.held_back.mean),
          percent(v.held_back.p95),
          aimed};
}

void print_extrapolated(const std::vector<Validation>& operations) {
  Table table({"extrapolated", "fitted", "mean", "p95", "beyond", "mean", "p95"});
  for (const Validation& v : operations) {
    auto row = row_of(v);
    row.pop_back();
    table.add(std::move(row));
  }
  fmt::print("fitted to contexts up to a quarter, to groups up to half of the largest:\n{}\n", table.text());
}

void print(const SystemReport& report) {
  fmt::print("{}\n\n", report.hardware);
  for (const auto& doubt : report.doubts) fmt::print("warning: {}\n", doubt);
  if (!report.checked()) {
    for (const auto& label : report.without_curve) fmt::print("no curve of its own: {}\n", label);
    fmt::print(
        "Nothing was checked: {} has no curve fitted to any of these operations (plan fit --table FILE makes some); "
        "its\n"
        "plans take another's curves or usual shares of peak.\n",
        report.hardware);
    return;
  }
  Table table({"operation", "used", "mean", "p95", "held back", "mean", "p95", "aim (mean)"});
  for (const Validation& v : report.operations) table.add(row_of(v));
  fmt::print("{}\n", table.text());
  Table families({"family", "used", "mean", "p95", "held back", "mean", "p95", "aim (mean)"});
  for (const Validation& v : report.families) families.add(row_of(v));
  fmt::print("{}\n", families.text());
  if (!report.extrapolated.empty()) print_extrapolated(report.extrapolated);
  for (const Validation& v : report.families) {
    if (v.worst.empty() || !misses_aim(v)) continue;
    fmt::print("{} misses its aim; worst rows held back:\n", v.label);
    for (const Miss& miss : v.worst) {
      fmt::print("  {:.2f} × the measured {:.1f} us: {}\n", miss.ratio, miss.seconds * 1e6, miss.shape);
    }
  }
  for (const auto& label : report.without_curve) fmt::print("no curve of its own: {}\n", label);
  fmt::print("\n");
}

json errors_json(const ErrorSummary& errors) {
  return {{"rows", errors.rows}, {"mean_error", errors.mean}, {"p95_error", errors.p95}};
}

json to_json(const Validation& v) {
  json result = {{"label", v.label},
                 {"operation", name_of(v.kind)},
                 {"priced", v.priced},
                 {"used", errors_json(v.used)},
                 {"held_back", errors_json(v.held_back)},
                 {"aim", aimed_error(v.kind)},
                 {"within_aim", !misses_aim(v)},
                 {"worst", json::array()}};
  for (const Miss& miss : v.worst) {
    result["worst"].push_back({{"ratio", miss.ratio}, {"measured_s", miss.seconds}, {"shape", miss.shape}});
  }
  return result;
}

void write_json(const std::vector<SystemReport>& reports, const std::string& path) {
  json result = machine_json(1, 0);
  result["command"] = "plan validate";
  result["systems"] = json::array();
  for (const SystemReport& report : reports) {
    json system = {{"hardware", report.hardware},           {"checked", report.checked()},
                   {"without_curve", report.without_curve}, {"warnings", report.doubts},
                   {"operations", json::array()},           {"families", json::array()}};
    for (const Validation& v : report.operations) system["operations"].push_back(to_json(v));
    for (const Validation& v : report.extrapolated) system["extrapolated"].push_back(to_json(v));
    for (const Validation& v : report.families) system["families"].push_back(to_json(v));
    result["systems"].push_back(std::move(system));
  }
  write_output_file("--json", path, result);
}

std::vector<SystemReport> run(const Options& options) {
  if (options.silicon.empty() == options.table.empty()) {
    invalid_argument("plan validate: give either --silicon DIR, or --table FILE with --hardware");
  }
  if (!options.table.empty()) {
    if (options.hardware.empty()) invalid_argument("plan validate: --table needs --hardware, a name or file");
    return {check(options.hardware, load_table(options.table), options)};
  }
  std::vector<SystemReport> reports;
  Progress progress;
  for (const auto& [hardware, folder] : silicon_systems(options.silicon)) {
    if (!options.hardware.empty() && options.hardware != hardware) continue;
    progress.show("checking " + hardware);
    reports.push_back(check(hardware, load_silicon(options.silicon, folder), options));
  }
  if (reports.empty()) {
    invalid_argument("plan validate: --hardware '{}': {} has no tables of it", options.hardware, options.silicon);
  }
  return reports;
}

}  // namespace

void add_plan_validate(CLI::App& plan, int& exit_code) {
  auto options = std::make_shared<Options>();
  auto* command = plan.add_subcommand("validate", "checks the curves against measured operations");
  command->add_option("--silicon", options->silicon, "directory of published tables, one folder a system");
  command->add_option("--table", options->table, "your own table, CSV (columns: docs/planner.md)");
  command->add_option("--hardware", options->hardware, "check this hardware only");
  command->add_option("--worst", options->worst, "rows to show for a family that misses its aim")
      ->check(CLI::Range(0, 1000));
  command->add_flag("--extrapolate", options->extrapolate, "also: how far fits carry beyond the rows that they saw");
  command->add_option("--json", options->json_path, "write the same as JSON to this file");
  command->callback([options, &exit_code] {
    check_output_file("--json", options->json_path);
    check_different_files("--json", options->json_path, "--table", options->table);
    const auto reports = run(*options);
    bool within = true, checked = true;
    for (const auto& report : reports) {
      print(report);
      checked = checked && report.checked();
      for (const Validation& v : report.operations) within = within && !misses_aim(v);
    }
    if (checked) fmt::print("{}\n", within ? "Every operation is within its aim." : "Some operations miss their aim.");
    if (!options->json_path.empty()) write_json(reports, options->json_path);
    exit_code = within && checked ? 0 : 1;
  });
}

}  // namespace isomer
