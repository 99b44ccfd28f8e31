// The search over training layouts, and its frontiers.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/train_step.h"

namespace isomer {

struct TrainPoint {
  std::uint32_t layout = 0;  // in TrainSearch::layouts
  double step_s = 0;
  double memory_bytes = 0;
};

struct TrainSearch {
  std::vector<TrainLayout> layouts;
  std::vector<TrainPoint> points;  // what fits, quickest first
  std::int64_t examined = 0;
  std::array<std::int64_t, kNumTrainUnfit> unfit{};
  double seconds = 0;  // of one thread
  const TrainLayout& layout_of(const TrainPoint& point) const { return layouts[point.layout]; }
};

/// Prices every layout on exactly `devices` that fits.
TrainSearch search_train(const TrainProblem& problem, const Hardware& hardware, int devices,
                         const std::vector<std::string_view>& schemes);

/// More than this is not searched.
inline constexpr int kMaxTrainDevices = 65536;
/// As far as the links reach, the smallest power of two of devices on which a layout fits, and that layout; nothing if
/// none does.
std::optional<TrainLayout> fewest_train_devices(const TrainProblem& problem, const Hardware& hardware,
                                                const std::vector<std::string_view>& schemes);

using TrainFilter = std::function<bool(const TrainLayout&)>;
/// The quickest that the filter takes; nothing if there is none.
std::optional<TrainPoint> quickest_point(const TrainSearch& search, const TrainFilter& filter);
/// Points that no other of the same filter beats in both speed and memory, quickest first.
std::vector<TrainPoint> memory_frontier(const TrainSearch& search, const TrainFilter& filter);

/// The scheme that a sequence is spread by: that of the layout, or "without SP" where it lies on one rank.
std::string family_of(const TrainLayout& layout);
/// Ways that were in use before latents travelled: no sequence parallelism, heads exchanged (explicit), a ring of keys
/// and values, and both.
bool is_train_baseline(const TrainLayout& layout);
/// Two layouts that differ in ZeRO and recomputation at most.
bool same_train_axes(const TrainLayout& a, const TrainLayout& b);

}  // namespace isomer
