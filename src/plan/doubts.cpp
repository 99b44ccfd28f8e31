#include "plan/doubts.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/quantity_text.h"
#include "plan/fit.h"

namespace isomer {

namespace {

/// Rows that contradict the device in one way.
struct Contradiction {
  std::int64_t rows = 0, first_row = 0;
  std::string first;  // what it takes, and what that implies

  void add(const TimedOperation& sample, const std::string& label, double times, const char* implies) {
    ++rows;
    if (rows > 1 && sample.row >= first_row) return;
    first_row = sample.row;
    first = fmt::format("row {} ({}) takes {}, {:.2g} times {}", sample.row, label, format_seconds(sample.seconds),
                        times, implies);
  }
};

std::string counted(std::int64_t rows) { return rows == 1 ? "1 row" : fmt::format("{} rows", rows); }

}  // namespace

std::vector<std::string> doubtful_times(const Hardware& hardware, const SampleFamilies& families) {
  Contradiction quick, slow;
  for (const auto& [label, family] : families) {
    const Rates rates = rates_of(hardware, family.curve);
    for (const TimedOperation& sample : family.samples) {
      const OpCost cost = cost_of(sample.operation);
      const bool links = is_collective(sample.operation.kind);
      const double bytes = links ? cost.bytes_written : cost.bytes_read + cost.bytes_written;
      const double flops_time = cost.flops / rates.flops_per_s, bytes_time = bytes / rates.bytes_per_s;
      const double ideal = std::max(flops_time, bytes_time);
      if (ideal > kDoubtfulRate * sample.seconds) {
        quick.add(sample, label, ideal / sample.seconds,
                  flops_time > bytes_time ? "the peak arithmetic rate"
                  : links                 ? "the bandwidth of its links"
                                          : "the memory's bandwidth");
      } else if (sample.seconds > kLongestLaunch_s && ideal < kDoubtfulShare * sample.seconds) {
        slow.add(sample, label, sample.seconds / ideal, "what its FLOPs and bytes need at peak rates");
      }
    }
  }
  std::vector<std::string> doubts;
  if (quick.rows > 0) {
    doubts.push_back(
        fmt::format("{} quicker than {} allows, the first: {}; the column takes seconds of one execution, and operands "
                    "that stand in a cache are quicker than memory",
                    counted(quick.rows), hardware.name, quick.first));
  }
  if (slow.rows > 0) {
    doubts.push_back(fmt::format(
        "{} slower than a thousandth of what {} does, the first: {}; the column takes seconds of one execution, not "
        "milliseconds or microseconds",
        counted(slow.rows), hardware.name, slow.first));
  }
  return doubts;
}

std::vector<std::string> doubtful_fits(const std::vector<Curve>& curves) {
  std::vector<std::string> doubts;
  for (const Curve& curve : curves) {
    const double worst = std::max(curve.used.mean, curve.held_back.rows > 0 ? curve.held_back.mean : 0);
    if (worst <= kDoubtfulError) continue;
    doubts.push_back(
        fmt::format("{} is {:.0f} % off on average, above {:.0f} %: the curve says little; look at the unit of its "
                    "times, its shapes, and the figures of --hardware",
                    curve.label(), 100 * worst, 100 * kDoubtfulError));
  }
  return doubts;
}

}  // namespace isomer
