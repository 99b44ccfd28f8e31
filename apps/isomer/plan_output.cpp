#include "apps/isomer/plan_output.h"

#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/table.h"
#include "core/error.h"
#include "core/quantity_text.h"
#include "plan/html_report.h"
#include "study/machine.h"

namespace isomer {

std::string tokens_text(std::int64_t tokens) {
  if (tokens % (1 << 20) == 0) return fmt::format("{}M", tokens >> 20);
  return tokens % 1024 == 0 ? fmt::format("{}K", tokens / 1024) : fmt::format("{}", tokens);
}

std::string efficiency_text(const Hardware& hardware, bool roofline, const std::vector<std::string>& stand_ins) {
  if (roofline) return "roofline alone: peak rates, nothing else";
  if (hardware.fitted) {
    return stand_ins.empty() ? "efficiencies fitted to measurements"
                             : fmt::format("efficiencies fitted to measurements, but not of {}: the nearest stand in",
                                           fmt::join(stand_ins, ", "));
  }
  return "efficiencies not measured on this device" +
         (hardware.curves_from.empty() ? std::string() : fmt::format(", curves of {}", hardware.curves_from));
}

std::string assumed_text(const Assumptions& assumptions, double memory_limit_bytes) {
  std::vector<std::string> assumed;
  const auto factor = [&](double value, const char* of) {
    if (value != 1) assumed.push_back(fmt::format("{:.3g} times {}", value, of));
  };
  if (memory_limit_bytes > 0) assumed.push_back("memory of a device " + format_bytes(memory_limit_bytes));
  if (assumptions.link_latency_s) assumed.push_back("link latency " + format_seconds(*assumptions.link_latency_s));
  factor(assumptions.link_bandwidth_factor, "the links' bandwidth");
  factor(assumptions.fp4_efficiency, "the FP4 rate");
  factor(assumptions.overlap_contention, "the time of overlapped work");
  factor(assumptions.kernel_efficiency, "the kernels' speed");
  if (assumptions.link_overlap > 0) {
    assumed.push_back(fmt::format("{:.0f} % of the links' time beside kernels", 100 * assumptions.link_overlap));
  }
  return assumed.empty() ? "" : fmt::format("  assumed: {}\n", fmt::join(assumed, ", "));
}

void check_reach(const std::string& whose, std::int64_t devices, const Hardware& hardware) {
  if (devices <= hardware.max_devices()) return;
  invalid_argument("{}{} devices: the links of {} reach {}", whose, devices, hardware.name, hardware.max_devices());
}

std::string positions_note(const ModelConfig& config, std::int64_t positions) {
  if (config.max_position_embeddings <= 0 || positions <= config.max_position_embeddings) return "";
  return fmt::format("  note: positions up to {} lie beyond the model's {}\n", positions,
                     config.max_position_embeddings);
}

std::string parts_text(const std::vector<StepShare>& shares) {
  std::string parts;
  for (const StepShare& share : shares) {
    if (share.seconds == 0) continue;
    parts += fmt::format("{}{} {}{}", parts.empty() ? "" : ", ", share.name, share.seconds < 0 ? "−" : "",
                         format_seconds(std::abs(share.seconds)));
  }
  return parts;
}

std::string operations_text(const std::vector<PricedOperation>& operations) {
  constexpr std::size_t kRows = 8;
  Table table({"operation", "times", "a step", "bound by"});
  for (std::size_t i = 0; i < std::min(kRows, operations.size()); ++i) {
    const PricedOperation& op = operations[i];
    table.add({op.operation.name, fmt::format("{}", op.times), format_seconds(op.seconds), op.bound});
  }
  return table.text();
}

void PlanFiles::check() const {
  check_output_file("--json", json);
  check_output_file("--html", html);
  check_different_files("--json", json, "--html", html);
}

void PlanFiles::write(const nlohmann::json& plan) const {
  nlohmann::json whole = machine_json(1, 0);
  whole.update(plan);
  if (!json.empty()) write_output_file("--json", json, whole);
  if (!html.empty()) write_output_file("--html", html, plan_html(whole));
}

}  // namespace isomer
