// The source of the row kernels, included once per instruction set with ISOMER_TARGET naming it. Everything here has
// internal linkage: an inline function shared with another translation unit could be replaced by a copy compiled for
// another instruction set.
#include <cmath>
#include <cstdint>

#include "kernels/cpu/elementwise.h"

namespace isomer::cpu {
namespace {

template <class T>
constexpr int kLanes = sizeof(Statistic<T>) == 8 ? 8 : 16;

inline float load(const float* p) { return *p; }
inline double load(const double* p) { return *p; }
inline float load(const bf16* p) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(p->bits) << 16); }
inline void store(float* p, float value) { *p = value; }
inline void store(double* p, double value) { *p = value; }
inline void store(bf16* p, float value) {
  const auto word = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (word >> 16) | 0x40u;
  p->bits = static_cast<std::uint16_t>((word & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

/// Σ f(i) over [0, width), summed in a fixed number of lanes and the lanes pairwise.
template <class S, int lanes, class F>
inline S lane_sum(std::int64_t width, F&& f) {
  S sums[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) sums[lane] += f(i + lane);
  }
  for (int lane = 0; i + lane < width; ++lane) sums[lane] += f(i + lane);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

template <class T>
void rms_norm_forward(const T* x, const T* weight, std::int64_t width, Statistic<T> eps, T* y, Statistic<T>* rstd) {
  using S = Statistic<T>;
  const S squares = lane_sum<S, kLanes<T>>(width, [&](std::int64_t i) { return load(x + i) * load(x + i); });
  const S scale = S(1) / std::sqrt(squares / static_cast<S>(width) + eps);
  if (weight != nullptr) {
    for (std::int64_t i = 0; i < width; ++i) store(y + i, load(x + i) * scale * load(weight + i));
  } else {
    for (std::int64_t i = 0; i < width; ++i) store(y + i, load(x + i) * scale);
  }
  *rstd = scale;
}

template <class T, class G>
void rms_norm_backward(const T* x, Statistic<T> rstd, const T* weight, const G* dy, const T* residual,
                       std::int64_t width, T* dx) {
  using S = Statistic<T>;
  const auto gradient = [&](std::int64_t i) {
    return weight != nullptr ? load(dy + i) * load(weight + i) : load(dy + i);
  };
  const S dot = lane_sum<S, kLanes<T>>(width, [&](std::int64_t i) { return gradient(i) * load(x + i); });
  const S shrink = dot * rstd * rstd / static_cast<S>(width);
  if (residual != nullptr) {
    for (std::int64_t i = 0; i < width; ++i) {
      store(dx + i, load(residual + i) + rstd * (gradient(i) - load(x + i) * shrink));
    }
  } else {
    for (std::int64_t i = 0; i < width; ++i) store(dx + i, rstd * (gradient(i) - load(x + i) * shrink));
  }
}

template <class T, class G>
void rms_norm_weight_gradient(const T* x, std::int64_t x_stride, const Statistic<T>* rstd, const G* dy,
                              std::int64_t dy_stride, std::int64_t rows, std::int64_t width, Statistic<T>* dweight) {
  for (std::int64_t i = 0; i < width; ++i) dweight[i] = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* x_row = x + row * x_stride;
    const G* dy_row = dy + row * dy_stride;
    const Statistic<T> scale = rstd[row];
    for (std::int64_t i = 0; i < width; ++i) dweight[i] += load(dy_row + i) * load(x_row + i) * scale;
  }
}

template <class T>
void rope(T* x, const Statistic<T>* cos, const Statistic<T>* sin, std::int64_t pairs, bool interleave,
          Statistic<T> sign) {
  using S = Statistic<T>;
  if (interleave) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      const S a = load(x + 2 * i), b = load(x + 2 * i + 1), s = sign * sin[i];
      store(x + 2 * i, a * cos[i] - b * s);
      store(x + 2 * i + 1, a * s + b * cos[i]);
    }
  } else {
    for (std::int64_t i = 0; i < pairs; ++i) {
      const S a = load(x + i), b = load(x + pairs + i), s = sign * sin[i];
      store(x + i, a * cos[i] - b * s);
      store(x + pairs + i, a * s + b * cos[i]);
    }
  }
}

inline double exponential(double x) { return std::exp(x); }

/// e^x for x ≤ 0, relative error below 2^−22: 2^n · p(f), |f| ≤ ½ ln 2, Taylor polynomial of degree 7.
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5·2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.98412698e-4f;
  p = p * f + 1.38888889e-3f;
  p = p * f + 8.33333333e-3f;
  p = p * f + 4.16666667e-2f;
  p = p * f + 1.66666667e-1f;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const auto bits = (static_cast<std::int32_t>(n) + 127) << 23;
  return x < -87.0f ? 0.0f : p * __builtin_bit_cast(float, bits);
}

/// The largest of [0, width), width > 0; NaN is passed over unless it comes first.
template <class T>
inline Statistic<T> lane_maximum(const T* x, std::int64_t width) {
  using S = Statistic<T>;
  constexpr int lanes = kLanes<T>;
  S maxima[lanes];
  for (auto& maximum : maxima) maximum = load(x);
  std::int64_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      const S value = load(x + i + lane);
      maxima[lane] = value > maxima[lane] ? value : maxima[lane];
    }
  }
  for (; i < width; ++i) maxima[0] = load(x + i) > maxima[0] ? load(x + i) : maxima[0];
  S maximum = maxima[0];
  for (const S candidate : maxima) maximum = candidate > maximum ? candidate : maximum;
  return maximum;
}

template <class T>
void softmax(const T* scores, Statistic<T> scale, std::int64_t valid, std::int64_t width, T* out) {
  using S = Statistic<T>;
  constexpr int lanes = kLanes<T>;
  if (valid > 0) {
    const S maximum = lane_maximum(scores, valid);
    const S sum =
        lane_sum<S, lanes>(valid, [&](std::int64_t j) { return exponential(scale * (load(scores + j) - maximum)); });
    const S inverse = S(1) / sum;
    for (std::int64_t j = 0; j < valid; ++j) {
      store(out + j, exponential(scale * (load(scores + j) - maximum)) * inverse);
    }
  }
  for (std::int64_t i = valid; i < width; ++i) store(out + i, S(0));
}

template <class T>
void softmax_backward(const T* p, const T* dp, Statistic<T> scale, std::int64_t width, T* out) {
  using S = Statistic<T>;
  const S dot = lane_sum<S, kLanes<T>>(width, [&](std::int64_t i) { return load(p + i) * load(dp + i); });
  for (std::int64_t i = 0; i < width; ++i) store(out + i, scale * load(p + i) * (load(dp + i) - dot));
}

template <class From, class To>
void convert(const From* in, std::int64_t width, To* out) {
  for (std::int64_t i = 0; i < width; ++i) store(out + i, load(in + i));
}

template <class A, class B>
void add(const A* a, const B* b, std::int64_t width, A* out) {
  for (std::int64_t i = 0; i < width; ++i) store(out + i, load(a + i) + load(b + i));
}

template <class T>
void scaled_sum(const T* a, const T* b, Statistic<T> scale, std::int64_t width, T* out) {
  if (b != nullptr) {
    for (std::int64_t i = 0; i < width; ++i) store(out + i, scale * (load(a + i) + load(b + i)));
  } else {
    for (std::int64_t i = 0; i < width; ++i) store(out + i, scale * load(a + i));
  }
}

template <class T>
void add_scaled(const T* a, Statistic<T> scale, std::int64_t width, Statistic<T>* out) {
  for (std::int64_t i = 0; i < width; ++i) out[i] += scale * load(a + i);
}

template <class T>
Statistic<T> dot(const T* a, const T* b, std::int64_t width) {
  return lane_sum<Statistic<T>, kLanes<T>>(width, [&](std::int64_t i) { return load(a + i) * load(b + i); });
}

/// σ(x) through e^−|x|, which can't overflow.
template <class S>
inline S logistic(S x) {
  const S e = exponential(x < S(0) ? x : -x);
  const S numerator = x < S(0) ? e : S(1);
  return numerator / (S(1) + e);
}

template <class T>
void sigmoid(const T* x, std::int64_t width, T* out) {
  for (std::int64_t i = 0; i < width; ++i) store(out + i, logistic(load(x + i)));
}

template <class T>
void silu_mul(const T* gate, const T* up, std::int64_t width, T* out) {
  for (std::int64_t i = 0; i < width; ++i) {
    const Statistic<T> g = load(gate + i);
    store(out + i, g * logistic(g) * load(up + i));
  }
}

template <class T>
void silu_mul_backward(const T* gate, const T* up, const T* dout, std::int64_t width, T* dgate, T* dup) {
  using S = Statistic<T>;
  for (std::int64_t i = 0; i < width; ++i) {
    const S g = load(gate + i), u = load(up + i), d = load(dout + i), sigma = logistic(g);
    store(dgate + i, d * u * sigma * (S(1) + g * (S(1) - sigma)));
    store(dup + i, d * g * sigma);
  }
}

template <class T>
TokenLoss cross_entropy(Statistic<T>* logits, std::int64_t width, Statistic<T> logit_scale, std::int64_t target,
                        Statistic<T> gradient_scale, T* dlogits) {
  using S = Statistic<T>;
  constexpr int lanes = kLanes<T>;
  const S maximum = lane_maximum(logits, width), at_target = logits[target];
  int equal_before = 0;
  if (at_target == maximum) {
    for (std::int64_t i = 0; i < target; ++i) equal_before += logits[i] == maximum ? 1 : 0;
  }
  const auto power = [&](std::int64_t i) { return exponential(logit_scale * (logits[i] - maximum)); };
  S sum;
  if (dlogits != nullptr) {
    sum = lane_sum<S, lanes>(width, [&](std::int64_t i) { return logits[i] = power(i); });
    const S full = gradient_scale * logit_scale, factor = full / sum;
    const S of_target = logits[target] * factor - full;
    for (std::int64_t i = 0; i < width; ++i) store(dlogits + i, logits[i] * factor);
    store(dlogits + target, of_target);
  } else {
    sum = lane_sum<S, lanes>(width, power);
  }
  const double above = static_cast<double>(maximum) - static_cast<double>(at_target);
  return {std::log(static_cast<double>(sum)) + static_cast<double>(logit_scale) * above,
          at_target == maximum && equal_before == 0};
}

template <class T>
constexpr RowKernels<T> make_row_kernels() {
  using S = Statistic<T>;
  return {.rms_norm_forward = rms_norm_forward<T>,
          .rms_norm_backward = rms_norm_backward<T, T>,
          .rms_norm_backward_wide = rms_norm_backward<T, S>,
          .rms_norm_weight_gradient = rms_norm_weight_gradient<T, T>,
          .rms_norm_weight_gradient_wide = rms_norm_weight_gradient<T, S>,
          .rope = rope<T>,
          .softmax = softmax<T>,
          .softmax_backward = softmax_backward<T>,
          .widen = convert<T, S>,
          .narrow = convert<S, T>,
          .add = add<T, T>,
          .scaled_sum = scaled_sum<T>,
          .add_wide = add<S, T>,
          .add_scaled = add_scaled<T>,
          .dot = dot<T>,
          .sigmoid = sigmoid<T>,
          .silu_mul = silu_mul<T>,
          .silu_mul_backward = silu_mul_backward<T>,
          .cross_entropy = cross_entropy<T>};
}

}  // namespace

namespace ISOMER_TARGET {
extern const RowKernels<float> kFloat32 = make_row_kernels<float>();
extern const RowKernels<bf16> kBfloat16 = make_row_kernels<bf16>();
extern const RowKernels<double> kFloat64 = make_row_kernels<double>();
}  // namespace ISOMER_TARGET
}  // namespace isomer::cpu
