// Everything between the products: norms, rotary embedding, softmax of kept scores, sums and copies. Statistics are
// float32 (float64 for float64 tensors).
#pragma once

#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// The type of statistics and accumulators beside tensors of `dtype`.
constexpr DType statistic_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

/// y = RMSNorm(x)·weight. x, y [num_rows, width] (unit inner stride), weight [width] or undefined (1), rstd [num_rows].
void rms_norm_forward(RankContext& ctx, std::string_view name, const Tensor& x, const Tensor& weight, double eps,
                      const Tensor& y, const Tensor& rstd);

struct RmsNormBackward {
  Tensor x;         // [num_rows, width], the forward's input
  Tensor rstd;      // [num_rows]
  Tensor weight;    // [width], optional
  Tensor dy;        // [num_rows, width], x's dtype or float32
  Tensor residual;  // [num_rows, width], optional: added to dx
  Tensor dx;        // [num_rows, width], out
  Tensor dweight;   // [width] in the statistics' dtype, out, optional
};
void rms_norm_backward(RankContext& ctx, std::string_view name, const RmsNormBackward& args);

/// cos and sin of the positions a rank holds, [num_positions, rope_dim/2], in the statistics' dtype. Row i of a tensor
/// has position index i / rows_per_position (sequences of a batch lie side by side).
struct RopeRows {
  Tensor cos, sin;
  std::int64_t rows_per_position = 1;
  bool interleave = true;
};
enum class RopeDirection : std::uint8_t { forward, inverse };
/// Rotates x [num_rows, num_heads, rope_dim] in place; the inverse is the gradient (transposed rotation, same
/// magnitude).
void apply_rope(RankContext& ctx, std::string_view name, const Tensor& x, const RopeRows& rope,
                RopeDirection direction);

/// Copies with conversion between float32 and bfloat16 where dtypes differ. Any strides with unit inner stride, 1 to 3
/// axes.
void copy(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to);
/// out = a + b, same shapes, up to 3 axes; b in a's dtype, or narrower.
void add(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const Tensor& out);
/// out = scale·(a + b), same shapes and dtype, up to 3 axes; b may be undefined (0).
void scaled_sum(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, double scale,
                const Tensor& out);
/// to[row] = Σ_head from[row, head], in the statistics' dtype. from [num_rows, num_heads, width], to [num_rows, width].
void sum_heads(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to);
/// x[row] += bias, x [num_rows, width].
void add_bias(RankContext& ctx, std::string_view name, const Tensor& bias, const Tensor& x);
/// to = Σ_row from[row], to [width] in the statistics' dtype.
void sum_rows(RankContext& ctx, std::string_view name, const Tensor& from, const Tensor& to);

/// out = softmax(scale·scores) along the last axis; with `causal`, row i sees the keys j ≤ i + diagonal.
/// [num_heads, num_queries, num_keys]; in place allowed; a row without keys is zero.
void softmax_forward(RankContext& ctx, std::string_view name, const Tensor& scores, double scale, bool causal,
                     std::int64_t diagonal, const Tensor& out);
/// out = scale·p∘(dp − rowsum(p∘dp)); out may be dp.
void softmax_backward(RankContext& ctx, std::string_view name, const Tensor& p, const Tensor& dp, double scale,
                      const Tensor& out);

}  // namespace isomer
