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

/// Partial results packed for one message: a row [out | lse], the LSE's bits in this many elements of out's type.
std::int64_t packed_lse_elements(DType dtype);
/// packed [rows, heads, width + packed_lse_elements] from out [rows, heads, width] and lse [heads, rows].
void pack_partial_attention(RankContext& ctx, const Tensor& out, const Tensor& lse, const Tensor& packed);
/// out [rows, heads, width] = Σ_j e^(lse_j − m) out_j / Σ_j e^(lse_j − m), m = max lse_j, of packed parts [parts, rows,
/// heads, width + packed_lse_elements], in their order; float32 sums (float64 for float64), rounded once. Parts of LSE
/// −inf are not read; where all are, out is 0.
void merge_packed_attention(RankContext& ctx, const Tensor& parts, const Tensor& out);

/// x[row, head] *= factors[head]. x [rows, heads, width] with unit inner stride.
void scale_heads(RankContext& ctx, std::string_view name, const Tensor& x, std::span<const double> factors);

}  // namespace isomer
