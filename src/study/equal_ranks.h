// Which ranks of a decode layout do the same in a step, so that a dry run need trace one of them alone.
#pragma once

#include <vector>

#include "cost/decode_layout.h"

namespace isomer {

/// For every rank the lowest one whose step is the same: as many layers of each kind, as many heads, columns and
/// experts, equal shares of every sum, the same place at the ends of a pipeline and among medha's slices. `batch`:
/// sequences, a token each, with `context` cached positions. Under data parallelism every rank is its own, with rows
/// that travel to others' experts.
std::vector<int> equal_ranks(const ModelConfig& config, const DecodeLayout& layout, std::int64_t batch,
                             std::int64_t context);

}  // namespace isomer
