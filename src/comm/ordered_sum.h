// Sums of blocks in rank order: accumulated in float32 (float64 for float64), rounded once, so that every backend and
// any number of threads give the same bits.
#pragma once

#include <vector>

#include "comm/block.h"
#include "core/rank_context.h"

namespace isomer {

/// out = sources[0] + sources[1] + …; `out` may be one of the sources. Entered in the record as "ordered_sum".
void ordered_sum(RankContext& ctx, DType dtype, const std::vector<Block>& sources, const Block& out);

}  // namespace isomer
