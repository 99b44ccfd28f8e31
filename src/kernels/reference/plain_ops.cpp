#include "kernels/reference/plain_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace isomer::reference {
namespace {

double inverse_rms(const double* x, double eps, std::int64_t width) {
  double sum = 0;
  for (std::int64_t j = 0; j < width; ++j) sum += x[j] * x[j];
  return 1 / std::sqrt(sum / static_cast<double>(width) + eps);
}

/// Rotation by the angle (direction 1) or its opposite (direction −1).
void rotate(double* x, const double* cos, const double* sin, std::int64_t rope_dim, RopePairs pairs, double direction) {
  const bool interleaved = pairs == RopePairs::interleaved;
  for (std::int64_t i = 0; i < rope_dim / 2; ++i) {
    double& first = x[interleaved ? 2 * i : i];
    double& second = x[interleaved ? 2 * i + 1 : i + rope_dim / 2];
    const double a = first, b = second;
    first = a * cos[i] - direction * b * sin[i];
    second = direction * a * sin[i] + b * cos[i];
  }
}

}  // namespace

void matmul(const double* a, const double* b, std::int64_t m, std::int64_t n, std::int64_t k, double* c) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      c[i * n + j] = sum;
    }
  }
}

void rms_norm(const double* x, const double* weight, double eps, std::int64_t num_rows, std::int64_t width, double* y) {
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const double inv = inverse_rms(x + i * width, eps, width);
    for (std::int64_t j = 0; j < width; ++j) y[i * width + j] = x[i * width + j] * inv * weight[j];
  }
}

void rms_norm_backward(const RmsNormBackward& p) {
  for (std::int64_t i = 0; i < p.num_rows; ++i) {
    const double* x = p.x + i * p.width;
    const double* dy = p.dy + i * p.width;
    double* dx = p.dx + i * p.width;
    const double inv = inverse_rms(x, p.eps, p.width);
    double projection = 0;  // mean of (dy · weight) · normalised x
    for (std::int64_t j = 0; j < p.width; ++j) projection += dy[j] * p.weight[j] * x[j] * inv;
    projection /= static_cast<double>(p.width);
    for (std::int64_t j = 0; j < p.width; ++j) {
      const double normed = x[j] * inv;
      p.dweight[j] += dy[j] * normed;
      dx[j] = inv * (dy[j] * p.weight[j] - normed * projection);
    }
  }
}

void rope_rotate(double* x, const double* cos, const double* sin, std::int64_t rope_dim, RopePairs pairs) {
  rotate(x, cos, sin, rope_dim, pairs, 1);
}

void rope_rotate_backward(double* dx, const double* cos, const double* sin, std::int64_t rope_dim, RopePairs pairs) {
  rotate(dx, cos, sin, rope_dim, pairs, -1);
}

double softmax(double* row, std::int64_t width) {
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  double largest = kMasked;
  for (std::int64_t j = 0; j < width; ++j) largest = std::max(largest, row[j]);
  if (largest == kMasked) {
    std::fill(row, row + width, 0.0);
    return kMasked;
  }
  double sum = 0;
  for (std::int64_t j = 0; j < width; ++j) sum += row[j] = std::exp(row[j] - largest);
  for (std::int64_t j = 0; j < width; ++j) row[j] /= sum;
  return largest + std::log(sum);
}

}  // namespace isomer::reference
