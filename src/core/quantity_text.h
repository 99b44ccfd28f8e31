// Bytes and seconds for people, in the unit that suits them.
#pragma once

#include <string>

namespace isomer {

/// 1234567 → "1.23 MB", decimal.
std::string format_bytes(double bytes);
/// 0.00123 → "1.2 ms".
std::string format_seconds(double seconds);

}  // namespace isomer
