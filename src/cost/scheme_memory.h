// Closed forms of what stands in a rank's memory under a training scheme (scheme_work.h). Inside src/cost.
#pragma once

#include "cost/scheme_shape.h"

namespace isomer {

/// Bytes of class `saved` when the forward has ended, recomputation left out.
std::int64_t saved_bytes(const SchemeShape& shape);
/// Bytes that stand while the core's backward runs, at the worst step where blocks pass round.
std::int64_t core_backward_bytes(const SchemeShape& shape);

}  // namespace isomer
