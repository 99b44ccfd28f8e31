// A device and its links as the planner sees them, and how long an operation takes there. Descriptions live in
// hardware/*.json, which the program carries (docs/planner.md, "Hardware files"); pricing is fast enough for millions
// of calls a second: coefficients are resolved when a description is loaded.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/operation.h"

namespace isomer {

class CurveSet;  // efficiency curves per operation (plan/curves.h)

/// Which experts the tokens visit, as the measured tables have it: evenly, or by a power law (some device has more).
enum class ExpertLoad : std::uint8_t { balanced, power_law_1_01, power_law_1_2 };
std::string_view name_of(ExpertLoad load);

inline constexpr int kNumPrecisions = 4;

/// Links that reach up to `devices` devices. Bandwidth is what one device sends, in one direction, at best.
struct LinkTier {
  std::string name;  // "NVLink", "InfiniBand"
  int devices = 1;
  double latency_s = 0;
  double bandwidth_bytes_per_s = 0;
};

struct Hardware {
  std::string name;         // "gb200-nvl72"
  std::string description;  // one line for people
  double memory_bandwidth_bytes_per_s = 0;
  double memory_capacity_bytes = 0;
  /// Dense, without structured sparsity, by Precision. 0: this device has no such units (see compute_precision).
  std::array<double, kNumPrecisions> flops_per_s{};
  std::vector<LinkTier> tiers;             // ascending in `devices`, the last one reaching furthest
  bool fitted = false;                     // whether its curves come from measurements of this very hardware
  std::string curves_from;                 // whose curves stand in, if not its own
  std::vector<std::string> sources;        // where the figures come from
  std::vector<std::string> doubts;         // what is uncertain about them
  std::shared_ptr<const CurveSet> curves;  // never null in a loaded description

  // Set by with_assumptions.
  bool roofline = false;  // bytes / bandwidth and FLOPs / peak alone, no launch time, the larger of both
  double fp4_efficiency = 1;
  /// While a collective and a kernel run beside each other, each takes this many times as long (1: no contention).
  double overlap_contention = 1;
  double kernel_efficiency = 1;    // of everything but collectives, times its curves'
  double backward_efficiency = 1;  // of attention's backward, times its forward's
  double link_overlap = 0;         // share of a training step's links that runs beside kernels, as far as there are any
  std::optional<Precision> exchange_precision;  // of partial results that travel between devices
  std::optional<double> assumed_link_latency_s;
  ExpertLoad expert_load = ExpertLoad::balanced;

  double peak_flops_per_s(Precision precision) const { return flops_per_s[static_cast<std::size_t>(precision)]; }
  /// The narrowest precision at least as wide as `wanted` that this device computes in: weights may be stored narrower
  /// than they are multiplied (H200 has no FP4 units). f32 where nothing narrower is there.
  Precision compute_precision(Precision wanted) const;
  /// The first tier that reaches `devices`; the last one where none does.
  const LinkTier& tier_for(int devices) const;
  int max_devices() const { return tiers.empty() ? 1 : tiers.back().devices; }
};

/// What a user may assume otherwise than the description says: the axes of a sensitivity study.
struct Assumptions {
  std::optional<double> link_latency_s;         // of every tier, instead of the description's and of fitted curves'
  double link_bandwidth_factor = 1;             // > 0, times every tier's
  std::optional<Precision> exchange_precision;  // see Hardware
  double fp4_efficiency = 1;                    // times the rate of nvfp4 arithmetic
  double overlap_contention = 1;                // see Hardware; ≥ 1
  double kernel_efficiency = 1;                 // see Hardware; > 0
  double backward_efficiency = 1;               // see Hardware; > 0
  double link_overlap = 0;                      // see Hardware; 0 to 1
  /// The published analyses' way: FLOPs / peak and bytes / bandwidth, the larger of both, nothing else; collectives
  /// latency × rounds + bytes / bandwidth, with the description's (or the assumed) latency.
  bool roofline = false;
  ExpertLoad expert_load = ExpertLoad::balanced;
};

/// The same hardware under other assumptions. Throws std::invalid_argument for a factor that is not positive or finite.
Hardware with_assumptions(const Hardware& hardware, const Assumptions& assumptions);

/// By built-in name ("gb200-nvl72") or path of a JSON file. Throws std::invalid_argument for an unknown name, with near
/// ones, and isomer::Error for a file that is missing, malformed or has impossible figures.
Hardware load_hardware(const std::string& name_or_path);
/// Sorted.
std::vector<std::string> builtin_hardware_names();

/// Seconds that all `operation.count` repetitions take on one device, nothing else running beside them. FLOPs and bytes
/// come from cost_of (plan/operation.h). Allocates nothing. An operation without work (m = 0, one device in a
/// collective) takes 0. Fields must not be negative; not checked here.
double seconds_of(const Hardware& hardware, const Operation& operation);

}  // namespace isomer
