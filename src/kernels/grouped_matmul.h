// The products of a mixture of experts: rows sorted by expert, one product an expert, all of them one operation. Types
// and strides as in matmul.h. How many rows an expert has changes from step to step, and a library that makes code for
// each shape would make it anew each time; where the weights are small, rows are therefore taken in a few fixed sizes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// c[begin[g], begin[g+1]) (+)= a[the same rows]·b[g]. a [num_rows, k], b[g] [k, n], c [num_rows, n].
void grouped_matmul(RankContext& ctx, std::string_view name, const Tensor& a, std::span<const std::int64_t> begin,
                    std::span<const Tensor> b, const Tensor& c, bool accumulate = false);

/// out[g] (+)= dy[rows of g]ᵀ·x[rows of g]. dy [num_rows, n], x [num_rows, k], out[g] [n, k] in the statistics' dtype;
/// a group without rows gives zeros, or changes nothing.
void grouped_weight_gradient(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x,
                             std::span<const std::int64_t> begin, std::span<const Tensor> out, bool accumulate = false);

}  // namespace isomer
