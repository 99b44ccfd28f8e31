// isomer plan fit: efficiency curves from measured operations into a hardware file.
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/plan_commands.h"
#include "apps/isomer/table.h"
#include "core/error.h"
#include "model/json_text.h"
#include "plan/builtin_hardware.h"
#include "plan/doubts.h"
#include "plan/fit.h"
#include "plan/fit_report.h"
#include "plan/hardware_json.h"
#include "study/machine.h"

namespace isomer {

namespace {

using nlohmann::json;

struct Options {
  std::string silicon, system, table, base, out, json_path;
};

struct Inputs {
  SampleFamilies families;
  std::string base;  // hardware whose figures are kept
  std::string data;  // for the file's "fit"
};

Inputs read_inputs(const Options& options) {
  if (options.silicon.empty() == options.table.empty()) {
    invalid_argument("plan fit: give either --silicon DIR with --system, or --table FILE");
  }
  if (!options.table.empty()) {
    if (options.base.empty()) {
      invalid_argument("plan fit: --table needs --hardware, a name or file with the device's peaks and links");
    }
    return {load_table(options.table), options.base,
            "a table of measured operations: " + std::filesystem::path(options.table).filename().string()};
  }
  const auto systems = silicon_systems(options.silicon);
  std::string known;
  for (const auto& [hardware, folder] : systems) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", folder);
    if (options.system != folder && options.system != hardware) continue;
    return {load_silicon(options.silicon, folder), options.base.empty() ? hardware : options.base,
            "AIConfigurator data set (ai-dynamo, Apache-2.0), " + folder + ": TensorRT-LLM 1.3.0rc20, NCCL 2.29.2"};
  }
  invalid_argument("plan fit: --system '{}': {} has {}", printable(options.system), options.silicon, known);
}

/// The file that the figures come from, as JSON, so that its words stay.
json description_of(const std::string& base) {
  for (const auto& hardware : builtin_hardware()) {
    if (hardware.name == base) return parse_json(hardware.json, base);
  }
  return parse_json(read_text_file(base, 64 << 20), base);
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

void print(const std::vector<Curve>& curves) {
  Table table({"operation", "rows", "mean", "p95", "held back", "mean", "p95", "coefficients"});
  for (const Curve& curve : curves) {
    std::size_t coefficients = 5;
    for (const Surface& surface : curve.surfaces) coefficients += surface.values.size();
    table.add({curve.label(), fmt::format("{}", curve.used.rows), percent(curve.used.mean), percent(curve.used.p95),
               fmt::format("{}", curve.held_back.rows), percent(curve.held_back.mean), percent(curve.held_back.p95),
               fmt::format("{}", coefficients)});
  }
  fmt::print("{}", table.text());
}

/// Of a user's table; the published ones are known.
std::vector<std::string> doubts_of(const Hardware& hardware, const Inputs& inputs, const std::vector<Curve>& curves,
                                   const Options& options) {
  if (options.table.empty()) return {};
  auto doubts = doubtful_times(hardware, inputs.families);
  for (std::string& doubt : doubtful_fits(curves)) doubts.push_back(std::move(doubt));
  return doubts;
}

/// What is said of a fit beside its curves.
struct Remarks {
  std::vector<std::string> skipped, kept, doubts;
};

json report(const std::vector<Curve>& curves, const Remarks& remarks, const Options& options) {
  json result = machine_json(1, 0);
  result["command"] = "plan fit";
  result["out"] = options.out;
  result["skipped"] = remarks.skipped;
  result["kept"] = remarks.kept;
  result["warnings"] = remarks.doubts;
  result["curves"] = json::array();
  for (const Curve& curve : curves) {
    json entry = curve_json(curve);
    entry.erase("surfaces");
    entry["label"] = curve.label();
    result["curves"].push_back(std::move(entry));
  }
  return result;
}

/// The fitted curves, and the hardware's own for operations that the table lacks; not those that it takes from another.
std::vector<Curve> with_kept(const std::vector<Curve>& curves, const Hardware& hardware,
                             std::vector<std::string>& kept) {
  std::vector<Curve> all = curves;
  if (!hardware.curves_from.empty()) return all;
  for (const Curve& curve : hardware.curves->all()) {
    const auto same = [&](const Curve& fitted) { return fitted.label() == curve.label(); };
    if (std::any_of(curves.begin(), curves.end(), same)) continue;
    all.push_back(curve);
    kept.push_back(curve.label());
  }
  return all;
}

void run(const Options& options) {
  check_output_file("--out", options.out);
  check_output_file("--json", options.json_path);
  check_different_files("--out", options.out, "--json", options.json_path);
  check_different_files("--out", options.out, "--table", options.table);
  check_different_files("--json", options.json_path, "--table", options.table);
  const Inputs inputs = read_inputs(options);
  const Hardware hardware = load_hardware(inputs.base);
  json description = description_of(inputs.base);
  std::vector<std::string> skipped;
  std::vector<Curve> curves;
  {
    Progress progress;
    curves = fit_all(
        hardware, inputs.families, [&](const std::string& label) { progress.show("fitting " + label); }, &skipped);
  }
  if (curves.empty()) {
    invalid_argument("plan fit: no operation has {} rows of one kind to fit to", kFewestRows);
  }
  std::vector<std::string> kept;
  std::vector<Curve> all = curves;
  if (!options.table.empty()) all = with_kept(curves, hardware, kept);
  description.erase("curves_from");
  if (!options.table.empty()) description["name"] = printable(std::filesystem::path(options.out).stem().string(), 90);
  const std::string text = hardware_text(with_curves(description, all, fit_json(inputs.data)));
  parse_hardware(parse_json(text, options.out), options.out);  // what is written must load again
  write_output_file("--out", options.out, text);
  print(curves);
  for (const auto& label : skipped) fmt::print("too few rows, not fitted: {}\n", label);
  if (!kept.empty()) fmt::print("kept of {}: {}\n", hardware.name, fmt::join(kept, ", "));
  fmt::print("wrote {}\n", options.out);
  const auto doubts = doubts_of(hardware, inputs, curves, options);
  for (const auto& doubt : doubts) fmt::print("warning: {}\n", doubt);
  if (options.json_path.empty()) return;
  write_output_file("--json", options.json_path,
                    report(curves, {.skipped = skipped, .kept = kept, .doubts = doubts}, options));
}

}  // namespace

void add_plan_fit(CLI::App& plan, int& exit_code) {
  auto options = std::make_shared<Options>();
  auto* command = plan.add_subcommand("fit", "fits efficiency curves to measured operations");
  command->add_option("--silicon", options->silicon, "directory of published tables, one folder a system");
  command->add_option("--system", options->system, "which of them: gb200, b200_sxm, h200_sxm");
  command->add_option("--table", options->table, "your own table, CSV (columns: docs/planner.md)");
  command->add_option("--hardware", options->base, "name or file of the hardware whose figures are kept");
  command->add_option("--out", options->out, "hardware file to write")->required();
  command->add_option("--json", options->json_path, "write the errors as JSON to this file");
  command->callback([options, &exit_code] {
    run(*options);
    exit_code = 0;
  });
}

}  // namespace isomer
