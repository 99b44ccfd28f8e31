#include "layers/projection.h"

#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace isomer {

Tensor row_statistics(RankContext& ctx, std::string_view name, MemoryClass memory_class, const Tensor& like) {
  return ctx.empty(name, memory_class, statistic_dtype(like.dtype()), {like.size(0)});
}

Tensor weight_gradient(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x) {
  Tensor gradient = ctx.empty(name, MemoryClass::gradient, statistic_dtype(x.dtype()), {dy.size(1), x.size(1)});
  matmul(ctx, name, dy.transpose(0, 1), x, gradient);
  return gradient;
}

Tensor bias_gradient(RankContext& ctx, std::string_view name, const Tensor& dy) {
  Tensor gradient = ctx.empty(name, MemoryClass::gradient, statistic_dtype(dy.dtype()), {dy.size(1)});
  sum_rows(ctx, name, dy, gradient);
  return gradient;
}

Tensor norm_gradient(RankContext& ctx, std::string_view name, const Tensor& weight) {
  return ctx.empty(name, MemoryClass::gradient, statistic_dtype(weight.dtype()), {weight.size(0)});
}

}  // namespace isomer
