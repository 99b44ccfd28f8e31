#include "apps/isomer/units.h"

#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.h"

namespace isomer {

namespace {

/// Splits "5.5us" into number and unit. False if there is no number in front.
bool split_unit(const std::string& text, double& number, std::string& unit) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  unit.assign(end, text.data() + text.size());
  return error == std::errc() && std::isfinite(number) && number >= 0;
}

double scaled(const std::string& what, const std::string& text,
              const std::vector<std::pair<std::string, double>>& units) {
  double number = 0;
  std::string unit;
  if (split_unit(text, number, unit)) {
    for (const auto& [name, factor] : units) {
      if (unit == name) return number * factor;
    }
  }
  std::string known;
  for (const auto& [name, factor] : units) known += (known.empty() ? "" : ", ") + name;
  invalid_argument("{} '{}': expected a number followed by one of {}", what, text, known);
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
    invalid_argument("{} {}: must lie between {} and {}", option, text, minimum, maximum);
  }
  if (error != std::errc() || (factor == 1 && !unit.empty())) {
    invalid_argument("{} '{}': expected a whole number such as 2048, 16K or 1M", option, text);
  }
  if (number < 0 || number > maximum / factor || number * factor < minimum) {
    invalid_argument("{} {}: must lie between {} and {}", option, text, minimum, maximum);
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

double parse_seconds(const std::string& option, const std::string& text) {
  return scaled(option, text, {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}});
}

double parse_bytes(const std::string& option, const std::string& text) {
  return scaled(option, text, {{"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}});
}

double parse_bandwidth(const std::string& option, const std::string& text) {
  return scaled(option, text, {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}, {"TB/s", 1e12}});
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

void check_output_file(const std::string& option, const std::string& file) {
  if (file.empty()) return;
  const std::filesystem::path path(file), folder = path.parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder)) {
    invalid_argument("{} {}: there is no directory '{}'; make it first", option, file, folder.string());
  }
  if (std::filesystem::is_directory(path))
    invalid_argument("{} {}: it is a directory; name a file in it", option, file);
}

std::string format_bytes(double bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 999.95 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : 1, units[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace isomer
