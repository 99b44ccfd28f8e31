// Row kernels: what happens to one row (or one block of columns) on one thread. The same source is compiled for several
// instruction sets (elementwise_impl.h), with reductions over a fixed number of lanes, so every set gives the same bits
// up to the fused multiply-adds it has.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"

namespace isomer::cpu {

/// Statistics and accumulators: float32 for float32 and bfloat16, float64 for float64.
template <class T>
struct StatisticOf {
  using type = float;
};
template <>
struct StatisticOf<double> {
  using type = double;
};
template <class T>
using Statistic = typename StatisticOf<T>::type;

struct TokenLoss {
  double loss;      // nats
  bool greedy_hit;  // the target has the largest logit, and the lowest index of those that have
};

template <class T>
struct RowKernels {
  using S = Statistic<T>;
  /// y = x · rstd · weight, rstd = (mean(x²) + eps)^−½. `weight` may be null (1).
  void (*rms_norm_forward)(const T* x, const T* weight, std::int64_t width, S eps, T* y, S* rstd);
  /// dx = residual + rstd·(g − x̂·mean(g·x̂)), x̂ = x·rstd, g = dy·weight. `weight`, `residual` may be null.
  void (*rms_norm_backward)(const T* x, S rstd, const T* weight, const T* dy, const T* residual, std::int64_t width,
                            T* dx);
  void (*rms_norm_backward_wide)(const T* x, S rstd, const T* weight, const S* dy, const T* residual,
                                 std::int64_t width, T* dx);
  /// dweight[c] = Σ_row dy·x·rstd over all rows, for `width` columns.
  void (*rms_norm_weight_gradient)(const T* x, std::int64_t x_stride, const S* rstd, const T* dy,
                                   std::int64_t dy_stride, std::int64_t rows, std::int64_t width, S* dweight);
  void (*rms_norm_weight_gradient_wide)(const T* x, std::int64_t x_stride, const S* rstd, const S* dy,
                                        std::int64_t dy_stride, std::int64_t rows, std::int64_t width, S* dweight);
  /// Rotates `pairs` pairs in place: adjacent (2i, 2i+1), or halves (i, i + pairs). sign −1 is the inverse.
  void (*rope)(T* x, const S* cos, const S* sin, std::int64_t pairs, bool interleave, S sign);
  /// out = softmax(scale·scores[0, valid)), 0 beyond; in place allowed.
  void (*softmax)(const T* scores, S scale, std::int64_t valid, std::int64_t width, T* out);
  /// out = scale·p∘(dp − Σ p∘dp); in place of dp allowed.
  void (*softmax_backward)(const T* p, const T* dp, S scale, std::int64_t width, T* out);
  void (*widen)(const T* in, std::int64_t width, S* out);
  void (*narrow)(const S* in, std::int64_t width, T* out);
  /// out = a + b; in place allowed.
  void (*add)(const T* a, const T* b, std::int64_t width, T* out);
  /// out = scale·(a + b); `b` may be null; in place allowed.
  void (*scaled_sum)(const T* a, const T* b, S scale, std::int64_t width, T* out);
  void (*add_wide)(const S* a, const T* b, std::int64_t width, S* out);
  /// out += scale·a.
  void (*add_scaled)(const T* a, S scale, std::int64_t width, S* out);
  S (*dot)(const T* a, const T* b, std::int64_t width);
  /// out = σ(x); in place allowed.
  void (*sigmoid)(const T* x, std::int64_t width, T* out);
  /// out = SiLU(gate)∘up; in place allowed.
  void (*silu_mul)(const T* gate, const T* up, std::int64_t width, T* out);
  /// dgate = dout∘up∘SiLU'(gate), dup = dout∘SiLU(gate); in place of gate and up allowed.
  void (*silu_mul_backward)(const T* gate, const T* up, const T* dout, std::int64_t width, T* dgate, T* dup);
  /// −ln softmax(logit_scale·logits)[target], logit_scale > 0; sums in lanes of S. With `dlogits` also gradient_scale
  /// times its gradient by the logits; the logits are destroyed then, and may be dlogits themselves.
  TokenLoss (*cross_entropy)(S* logits, std::int64_t width, S logit_scale, std::int64_t target, S gradient_scale,
                             T* dlogits);
};

enum class InstructionSet : std::uint8_t { baseline, avx2, avx512 };
std::string_view name_of(InstructionSet set);

/// Those that this processor has, `baseline` first, the best last.
std::span<const InstructionSet> available_instruction_sets();

/// The kernels compiled for `set`, which must be available.
template <class T>
const RowKernels<T>& row_kernels_of(InstructionSet set);
template <>
const RowKernels<float>& row_kernels_of<float>(InstructionSet set);
template <>
const RowKernels<bf16>& row_kernels_of<bf16>(InstructionSet set);
template <>
const RowKernels<double>& row_kernels_of<double>(InstructionSet set);

/// The kernels of the best instruction set of this processor.
template <class T>
const RowKernels<T>& row_kernels() {
  return row_kernels_of<T>(available_instruction_sets().back());
}

}  // namespace isomer::cpu
