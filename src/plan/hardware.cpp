#include "plan/hardware.h"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/near_names.h"
#include "model/json_text.h"
#include "plan/builtin_hardware.h"
#include "plan/curves.h"
#include "plan/hardware_json.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxHardwareBytes = 64 << 20;

const BuiltinHardware* find_builtin(std::string_view name) {
  for (const auto& hardware : builtin_hardware()) {
    if (hardware.name == name) return &hardware;
  }
  return nullptr;
}

[[noreturn]] void unknown_hardware(const std::string& wanted) {
  const auto names = builtin_hardware_names();
  const auto near = near_names(wanted, names);
  const std::string hint = near.empty() ? "." : fmt::format("; did you mean {}?", fmt::join(near, " or "));
  invalid_argument("hardware '{}': no built-in hardware or file of this name{} Built in: {}", printable(wanted), hint,
                   fmt::join(names, ", "));
}

void check_factor(const char* name, double value, double low) {
  if (!std::isfinite(value) || value < low || value <= 0) {
    invalid_argument("assumption {} = {}: must be a finite number {}", name, value,
                     low > 0 ? fmt::format("of at least {}", low) : "above 0");
  }
}

}  // namespace

Precision Hardware::compute_precision(Precision wanted) const {
  for (int p = static_cast<int>(wanted); p > 0; --p) {
    if (flops_per_s[static_cast<std::size_t>(p)] > 0) return static_cast<Precision>(p);
  }
  return Precision::f32;
}

const LinkTier& Hardware::tier_for(int devices) const {
  static const LinkTier kNone{.name = "none", .devices = 1, .bandwidth_bytes_per_s = 1};
  for (const LinkTier& tier : tiers) {
    if (devices <= tier.devices) return tier;
  }
  return tiers.empty() ? kNone : tiers.back();
}

std::vector<std::string> builtin_hardware_names() {
  std::vector<std::string> names;
  for (const auto& hardware : builtin_hardware()) names.emplace_back(hardware.name);
  std::sort(names.begin(), names.end());
  return names;
}

std::shared_ptr<const CurveSet> borrowed_curves(const std::string& from, const std::string& where) {
  const BuiltinHardware* lender = find_builtin(from);
  if (lender == nullptr) {
    throw Error(fmt::format("{}: curves_from = {}: expected built-in hardware, one of {}", where, printable(from),
                            fmt::join(builtin_hardware_names(), ", ")));
  }
  const nlohmann::json json = parse_json(lender->json, from);
  if (json.contains("curves_from")) {
    throw Error(fmt::format("{}: curves_from = {}: expected hardware with curves of its own", where, from));
  }
  return parse_hardware(json, from).curves;
}

Hardware load_hardware(const std::string& name_or_path) {
  if (const BuiltinHardware* builtin = find_builtin(name_or_path)) {
    return parse_hardware(parse_json(builtin->json, name_or_path), name_or_path);
  }
  std::error_code code;
  if (!std::filesystem::exists(name_or_path, code)) unknown_hardware(name_or_path);
  return parse_hardware(parse_json(read_text_file(name_or_path, kMaxHardwareBytes), name_or_path), name_or_path);
}

Hardware with_assumptions(const Hardware& hardware, const Assumptions& assumptions) {
  check_factor("link_bandwidth_factor", assumptions.link_bandwidth_factor, 0);
  check_factor("fp4_efficiency", assumptions.fp4_efficiency, 0);
  check_factor("overlap_contention", assumptions.overlap_contention, 1);
  check_factor("kernel_efficiency", assumptions.kernel_efficiency, 0);
  check_factor("backward_efficiency", assumptions.backward_efficiency, 0);
  if (!(assumptions.link_overlap >= 0 && assumptions.link_overlap <= 1)) {
    invalid_argument("assumption link_overlap = {}: must lie between 0 and 1", assumptions.link_overlap);
  }
  if (assumptions.link_latency_s && !(*assumptions.link_latency_s >= 0 && *assumptions.link_latency_s <= 1)) {
    invalid_argument("assumption link_latency_s = {}: must lie between 0 and 1 s", *assumptions.link_latency_s);
  }
  Hardware result = hardware;
  for (LinkTier& tier : result.tiers) {
    tier.bandwidth_bytes_per_s *= assumptions.link_bandwidth_factor;
    if (assumptions.link_latency_s) tier.latency_s = *assumptions.link_latency_s;
  }
  result.assumed_link_latency_s = assumptions.link_latency_s;
  if (assumptions.exchange_precision) result.exchange_precision = assumptions.exchange_precision;
  result.fp4_efficiency = assumptions.fp4_efficiency;
  result.overlap_contention = assumptions.overlap_contention;
  result.kernel_efficiency = assumptions.kernel_efficiency;
  result.backward_efficiency = assumptions.backward_efficiency;
  result.link_overlap = assumptions.link_overlap;
  result.roofline = assumptions.roofline;
  result.expert_load = assumptions.expert_load;
  return result;
}

}  // namespace isomer
