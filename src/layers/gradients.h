// Gradients of weights that may be there already: a defined tensor is added to, an undefined one is made. All are
// float32 (float64 for float64).
#pragma once

#include <string_view>

#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace isomer {

/// gradient [out, in] (+)= dyᵀ·x; dy [T, out], x [T, in].
inline void add_weight_gradient(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x,
                                Tensor& gradient) {
  const bool accumulate = gradient.defined();
  if (!accumulate) {
    gradient = ctx.empty(name, MemoryClass::gradient, statistic_dtype(x.dtype()), {dy.size(1), x.size(1)});
  }
  matmul(ctx, name, dy.transpose(0, 1), x, gradient, accumulate);
}

/// rms_norm_backward with args.dweight going to `gradient`, added where it is there already.
inline void add_norm_gradient(RankContext& ctx, std::string_view name, RmsNormBackward args, Tensor& gradient) {
  const Shape shape{args.x.size(1)};
  const DType dtype = statistic_dtype(args.x.dtype());
  if (!gradient.defined()) {
    gradient = args.dweight = ctx.empty(name, MemoryClass::gradient, dtype, shape);
    return rms_norm_backward(ctx, name, args);
  }
  args.dweight = ctx.empty(name, MemoryClass::workspace, dtype, shape);
  rms_norm_backward(ctx, name, args);
  add(ctx, name, gradient, args.dweight, gradient);
}

}  // namespace isomer
