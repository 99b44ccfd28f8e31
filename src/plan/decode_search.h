// The search over decode layouts and batches, its Pareto frontier, and the best under a limit.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/decode_step.h"

namespace isomer {

struct DecodeSearchOptions {
  int max_devices = 64;
  std::vector<std::int64_t> batches;  // sequences decoded together; empty: default_batches()
  bool include_inexact = false;       // TPLA and GLA change what the model says
  std::vector<DecodeLayout> layouts;  // empty: all
};

/// 1, 2, 3, 4, 6, 8, 12, … up to `largest`.
std::vector<std::int64_t> default_batches(std::int64_t largest = 65536);

struct DecodePoint {
  std::uint32_t layout = 0;  // in DecodeSearch::layouts
  std::int32_t devices = 1;
  std::int64_t batch = 0;
  double step_s = 0;  // between two tokens of a sequence
  double per_user() const { return 1 / step_s; }
  double per_device() const { return static_cast<double>(batch) / step_s / devices; }
};

struct DecodeSearch {
  std::vector<DecodeLayout> layouts;
  std::vector<DecodePoint> points;              // what fits, priced
  std::int64_t examined = 0;                    // layouts × batches
  std::array<std::int64_t, kNumUnfit> unfit{};  // of those, by reason
  double seconds = 0;                           // of one thread
  const DecodeLayout& layout_of(const DecodePoint& point) const { return layouts[point.layout]; }
};

/// Prices every layout at every batch that fits. Throws std::invalid_argument for no devices or an empty context.
DecodeSearch search_decode(const DecodeProblem& problem, const Hardware& hardware, const DecodeSearchOptions& options);

using LayoutFilter = std::function<bool(const DecodeLayout&)>;
/// Points that no other of the same filter beats in both tokens/s/user and tokens/s/device, quickest first.
std::vector<DecodePoint> pareto_frontier(const DecodeSearch& search, const LayoutFilter& filter);

/// What makes a point the best: most tokens/s/device within a limit, or the shortest step.
struct Objective {
  LayoutFilter filter;
  std::optional<double> ttl_s;  // longest step
  bool quickest = false;
  /// Whether `a` is better than `b`.
  bool prefers(const DecodePoint& a, const DecodePoint& b) const;
};
/// Nothing if no point meets filter and limit.
std::optional<DecodePoint> best_point(const DecodeSearch& search, const Objective& objective);

/// The next best layout by the same objective that differs in more than an option, and what it loses on.
struct Neighbour {
  DecodePoint point;
  std::string why;  // "exchange +310 us a step"
};
std::optional<Neighbour> next_best(const DecodeProblem& problem, const Hardware& hardware, const DecodeSearch& search,
                                   const DecodePoint& chosen, const Objective& objective);

/// Bytes that a device may hold: as limited, or the description's.
double memory_capacity(const DecodeProblem& problem, const Hardware& hardware);

/// What is needed where nothing fits: the layout and batch that take the least memory of a device.
struct LeastMemory {
  DecodeLayout layout;
  std::int64_t batch = 0;
  DecodeMemory memory;
};
std::optional<LeastMemory> least_memory(const DecodeProblem& problem, const Hardware& hardware,
                                        const DecodeSearchOptions& options);

/// More than this is not searched.
inline constexpr int kMaxDecodeDevices = 4096;
/// An exact layout that fits on the smallest power of two of devices above options.max_devices, as far as the links
/// reach. Nothing if none does, or where the options name their layouts.
std::optional<LeastMemory> fewest_devices(const DecodeProblem& problem, const Hardware& hardware,
                                          const DecodeSearchOptions& options);

}  // namespace isomer
