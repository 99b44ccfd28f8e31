// Double-precision twins of small operations, as simple loops: what tests hold the kernels against. All matrices are
// row-major and dense.
#pragma once

#include <cstdint>

namespace isomer::reference {

/// c [m, n] = a [m, k] · b [k, n].
void matmul(const double* a, const double* b, std::int64_t m, std::int64_t n, std::int64_t k, double* c);

/// y = x / sqrt(mean(x²) + eps) · weight for each of `num_rows` rows of `width`.
void rms_norm(const double* x, const double* weight, double eps, std::int64_t num_rows, std::int64_t width, double* y);

struct RmsNormBackward {
  const double* dy = nullptr;      // [num_rows, width]
  const double* x = nullptr;       // [num_rows, width], the input of the forward
  const double* weight = nullptr;  // [width]
  double eps = 0;
  std::int64_t num_rows = 0, width = 0;
  double* dx = nullptr;       // [num_rows, width]; may be dy
  double* dweight = nullptr;  // [width], added to
};
void rms_norm_backward(const RmsNormBackward& params);

/// Where the two members of a rotated pair stand.
enum class RopePairs : bool { halves, interleaved };

/// Rotates x [rope_dim] in place by cos, sin [rope_dim / 2]; every element keeps its place.
void rope_rotate(double* x, const double* cos, const double* sin, std::int64_t rope_dim, RopePairs pairs);
/// The transpose of rope_rotate: takes the gradient of the rotated row to that of the row.
void rope_rotate_backward(double* dx, const double* cos, const double* sin, std::int64_t rope_dim, RopePairs pairs);

/// Softmax of one row of `width` logits in place; returns its natural-log LSE. −inf is a masked logit; a row with
/// nothing else becomes zeros, with LSE −inf.
double softmax(double* row, std::int64_t width);

}  // namespace isomer::reference
