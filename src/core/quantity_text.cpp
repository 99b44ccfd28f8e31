#include "core/quantity_text.h"

#include <fmt/format.h>

#include <cmath>

namespace isomer {

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
  if (seconds > 0 && seconds < 9.95e-6) return fmt::format("{:.{}f} us", seconds * 1e6, seconds < 0.95e-6 ? 2 : 1);
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace isomer
