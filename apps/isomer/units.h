// Parsing of what people type: counts (16K, 1M), times (5us), bandwidths (2GB/s).
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "core/quantity_text.h"
#include "core/virtual_clock.h"

namespace isomer {

inline constexpr double kLargest = std::numeric_limits<double>::max();

/// "2048", "16K", "1M": K and M of tokens are 1024 and 1024². Throws std::invalid_argument naming option and value.
std::int64_t parse_count(const std::string& option, const std::string& text, std::int64_t minimum,
                         std::int64_t maximum);
/// A seed: a whole number from 0 to 2^64 − 1. Throws std::invalid_argument naming value and range.
std::uint64_t parse_seed(const std::string& text);
/// "25ms", "5us"; units ns, us, ms, s. Throws std::invalid_argument naming option, value and units, or the limit that
/// the value misses.
double parse_seconds(const std::string& option, const std::string& text, double low = 0, double high = kLargest);
/// "80GB", decimal; units B, KB, MB, GB, TB.
double parse_bytes(const std::string& option, const std::string& text, double low = 0, double high = kLargest);
/// "900GB/s", decimal; units B/s to TB/s.
double parse_bandwidth(const std::string& option, const std::string& text, double low = 0, double high = kLargest);
/// "5us,2GB/s" (times ns, us, ms, s; bandwidths B/s to TB/s, decimal).
LinkModel parse_link(const std::string& text);

}  // namespace isomer
