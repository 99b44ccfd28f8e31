// Partial attention results of several ranks, each over its own keys, as a sum: every part is weighed where it stands,
// and a reduction adds them up. attention.h has the merge of two parts in one place.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// out *= e^(lses[part] − ln Σ_j e^lses[j]), the weight of part `part` in a merge of all parts, whose outs then add up
/// to the merged one; where the part saw no key its rows become 0. out [rows, heads, width], lses [parts, heads, rows]
/// float32 (float64 for float64).
void weigh_partial_attention(RankContext& ctx, const Tensor& out, const Tensor& lses, std::int64_t part);

/// x[row, head] *= factors[head]. x [rows, heads, width] with unit inner stride.
void scale_heads(RankContext& ctx, std::string_view name, const Tensor& x, std::span<const double> factors);

}  // namespace isomer
