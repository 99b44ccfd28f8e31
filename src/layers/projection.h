// What projections and norms of every block's stages have in common: their statistics and the gradients of their
// weights.
#pragma once

#include <string_view>

#include "core/rank_context.h"

namespace isomer {

/// One statistic a row of `like`, uninitialised.
Tensor row_statistics(RankContext& ctx, std::string_view name, MemoryClass memory_class, const Tensor& like);

/// dweight [out, in] = dyᵀ·x in the statistics' dtype, for dy [T, out] and x [T, in].
Tensor weight_gradient(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x);

/// dbias [out] = Σ_row dy[row] in the statistics' dtype.
Tensor bias_gradient(RankContext& ctx, std::string_view name, const Tensor& dy);

/// Where rms_norm_backward puts the gradient of `weight`.
Tensor norm_gradient(RankContext& ctx, std::string_view name, const Tensor& weight);

}  // namespace isomer
