// Whole grids run only where they are asked for; the everyday suite keeps a sample of each axis.
#pragma once

#include <cstdlib>

namespace isomer::testing {

/// ISOMER_FULL_TESTS is set (to anything).
inline bool full_tests() { return std::getenv("ISOMER_FULL_TESTS") != nullptr; }

}  // namespace isomer::testing
