// What `isomer plan decode` and `isomer plan train` print alike.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "plan/decode_step.h"

namespace isomer {

/// What may be assumed of links, of a device's memory and of a limit on time.
inline constexpr double kMaxLinkLatency_s = 1, kMinLinkBandwidth = 1e6, kMaxLinkBandwidth = 1e14, kMinMemory = 1e6,
                        kMaxMemory = 1e18, kMinTtl_s = 1e-9, kMaxTtl_s = 1e9;

/// 131072 → "128K".
std::string tokens_text(std::int64_t tokens);
/// Whose efficiencies these are; `stand_ins`: kinds of operations that the hardware's own measurements lack.
std::string efficiency_text(const Hardware& hardware, bool roofline, const std::vector<std::string>& stand_ins);
/// "  assumed: memory of a device 80.0 GB, link latency 5.0 us\n": what was asked for instead of the description's; or
/// nothing.
std::string assumed_text(const Assumptions& assumptions, double memory_limit_bytes);
/// Throws std::invalid_argument where no link of the hardware reaches so many; `whose`: "--schemes: ring:64: ", or
/// empty.
void check_reach(const std::string& whose, std::int64_t devices, const Hardware& hardware);
/// "  note: positions up to … lie beyond the model's …\n", or nothing where they don't.
std::string positions_note(const ModelConfig& config, std::int64_t positions);
/// "attention 3.1 ms, projections 1.0 ms, hidden by overlap −0.2 ms"; parts that take nothing are left out.
std::string parts_text(const std::vector<StepShare>& shares);
/// A table of the longest few.
std::string operations_text(const std::vector<PricedOperation>& operations);

/// --json and --html. Checks at once that they can be written; what was given is written at the end.
struct PlanFiles {
  std::string json, html;
  void check() const;
  /// `plan`: what to_json gave, under the keys of every file.
  void write(const nlohmann::json& plan) const;
};

}  // namespace isomer
