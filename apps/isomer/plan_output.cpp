#include "apps/isomer/plan_output.h"

#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "apps/isomer/output_file.h"
#include "apps/isomer/table.h"
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
