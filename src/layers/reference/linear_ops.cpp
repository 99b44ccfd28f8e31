#include "layers/reference/linear_ops.h"

#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "kernels/reference/plain_ops.h"

namespace isomer::reference {

void check_size(std::string_view name, const Values& values, const Shape& shape, bool optional) {
  const auto size = static_cast<std::int64_t>(values.size());
  if (size == num_elements(shape) || (optional && values.empty())) return;
  invalid_argument("{} has {} values, but the configuration makes it {}", name, size, to_string(shape));
}

Values linear(const Values& x, const Values& weight, const Values& bias, std::int64_t num_rows, int num_threads) {
  const std::int64_t in = static_cast<std::int64_t>(x.size()) / num_rows;
  const std::int64_t out = static_cast<std::int64_t>(weight.size()) / in;
  Values y(static_cast<std::size_t>(num_rows * out));
  for (std::size_t i = 0; i < y.size() && !bias.empty(); ++i) y[i] = bias[i % bias.size()];
  gemm_tiled({.m = num_rows,
              .n = out,
              .k = in,
              .a = x.data(),
              .a_stride = in,
              .b = weight.data(),
              .b_stride = in,
              .b_transposed = true,
              .c = y.data(),
              .c_stride = out,
              .beta = 1},
             num_threads);
  return y;
}

void linear_backward(const LinearBackward& p, Values& dx, NamedValues& gradients, int num_threads) {
  const std::int64_t in = static_cast<std::int64_t>(p.x.size()) / p.num_rows;
  const std::int64_t out = static_cast<std::int64_t>(p.dy.size()) / p.num_rows;
  Values dweight(p.weight.size());
  gemm_tiled({.m = out,
              .n = in,
              .k = p.num_rows,
              .a = p.dy.data(),
              .a_stride = out,
              .a_transposed = true,
              .b = p.x.data(),
              .b_stride = in,
              .c = dweight.data(),
              .c_stride = in},
             num_threads);
  gemm_tiled({.m = p.num_rows,
              .n = in,
              .k = out,
              .a = p.dy.data(),
              .a_stride = out,
              .b = p.weight.data(),
              .b_stride = in,
              .c = dx.data(),
              .c_stride = in,
              .beta = 1},
             num_threads);
  gradients[p.name + ".weight"] = std::move(dweight);
  if (p.bias.empty()) return;
  Values& dbias = gradients[p.name + ".bias"];
  dbias.resize(p.bias.size());
  for (std::size_t i = 0; i < p.dy.size(); ++i) dbias[i % dbias.size()] += p.dy[i];
}

Values norm(const Values& x, const Values& weight, double eps) {
  Values y(x.size());
  const auto width = static_cast<std::int64_t>(weight.size());
  rms_norm(x.data(), weight.data(), eps, static_cast<std::int64_t>(x.size()) / width, width, y.data());
  return y;
}

Values norm_backward(const Values& dy, const Values& x, const Values& weight, double eps, const std::string& name,
                     NamedValues& gradients) {
  Values dx(x.size());
  Values dweight(weight.size());
  const auto width = static_cast<std::int64_t>(weight.size());
  rms_norm_backward({.dy = dy.data(),
                     .x = x.data(),
                     .weight = weight.data(),
                     .eps = eps,
                     .num_rows = static_cast<std::int64_t>(x.size()) / width,
                     .width = width,
                     .dx = dx.data(),
                     .dweight = dweight.data()});
  gradients[name + ".weight"] = std::move(dweight);
  return dx;
}

}  // namespace isomer::reference
