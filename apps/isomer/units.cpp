#include "apps/isomer/units.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

/// Splits "5.5us" into number and unit. False if there is no number in front.
bool split_unit(const std::string& text, double& number, std::string& unit) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc::result_out_of_range) number = std::numeric_limits<double>::infinity();
  unit.assign(end, text.data() + text.size());
  return error != std::errc::invalid_argument && !std::isnan(number);
}

using Units = std::vector<std::pair<std::string, double>>;

/// "1 us": in the largest unit that keeps it at 1 or more.
std::string in_units(double value, const Units& units) {
  auto best = units.front();
  for (const auto& unit : units) {
    if (value >= unit.second) best = unit;
  }
  return fmt::format("{:g}{}", value / best.second, best.first);
}

/// `units` ascending. What lies outside [low, high] is refused with the limit that it misses.
double scaled(const std::string& what, const std::string& text, const Units& units, double low, double high) {
  double number = 0;
  std::string unit;
  if (split_unit(text, number, unit)) {
    for (const auto& [name, factor] : units) {
      if (unit != name) continue;
      const double value = number * factor;
      if (value >= low && value <= high) return value;
      invalid_argument("{} {}: must be {} {}", what, printable(text), value < low ? "at least" : "at most",
                       in_units(value < low ? low : high, units));
    }
  }
  std::string known;
  for (const auto& [name, factor] : units) known += (known.empty() ? "" : ", ") + name;
  invalid_argument("{} '{}': expected a number followed by one of {}", what, printable(text), known);
}

}  // namespace

std::int64_t parse_count(const std::string& option, const std::string& text, std::int64_t minimum,
                         std::int64_t maximum) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(end, text.data() + text.size());
  std::int64_t factor = 1;
  if (unit == "K" || unit == "k") factor = 1024;
  if (unit == "M" || unit == "m") factor = 1024 * 1024;
  if (error == std::errc::result_out_of_range) {
    invalid_argument("{} {}: must lie between {} and {}", option, printable(text), minimum, maximum);
  }
  if (error != std::errc() || (factor == 1 && !unit.empty())) {
    invalid_argument("{} '{}': expected a whole number such as 2048, 16K or 1M", option, printable(text));
  }
  if (number < 0 || number > maximum / factor || number * factor < minimum) {
    invalid_argument("{} {}: must lie between {} and {}", option, printable(text), minimum, maximum);
  }
  return number * factor;
}

std::uint64_t parse_seed(const std::string& text) {
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) {
    invalid_argument("--seed '{}': expected a whole number from 0 to {}", text,
                     std::numeric_limits<std::uint64_t>::max());
  }
  return seed;
}

double parse_seconds(const std::string& option, const std::string& text, double low, double high) {
  return scaled(option, text, {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}, low, high);
}

double parse_bytes(const std::string& option, const std::string& text, double low, double high) {
  return scaled(option, text, {{"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}}, low, high);
}

double parse_bandwidth(const std::string& option, const std::string& text, double low, double high) {
  return scaled(option, text, {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}, {"TB/s", 1e12}}, low, high);
}

LinkModel parse_link(const std::string& text) {
  const auto comma = text.find(',');
  if (comma == std::string::npos) {
    invalid_argument("--link '{}': expected LATENCY,BANDWIDTH such as 5us,2GB/s", text);
  }
  LinkModel link{.emulated = true};
  link.latency_s = parse_seconds("--link latency", text.substr(0, comma));
  link.bandwidth_bytes_per_s = parse_bandwidth("--link bandwidth", text.substr(comma + 1));
  constexpr double kMaxLatency_s = 60, kMinBandwidth = 1e3;
  if (link.latency_s > kMaxLatency_s) {
    invalid_argument("--link '{}': the latency must be at most {} s, since every collective waits for it", text,
                     kMaxLatency_s);
  }
  if (link.bandwidth_bytes_per_s < kMinBandwidth) {
    invalid_argument("--link '{}': the bandwidth must be at least {} B/s", text, kMinBandwidth);
  }
  return link;
}

}  // namespace isomer
