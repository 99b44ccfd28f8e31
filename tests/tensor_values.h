// Tensors out of plain doubles and back, for tests that hold kernels against double twins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/tensor.h"

namespace isomer::testing {

/// Calls visit(offset in elements from data(), index) over the elements of any view in logical order.
template <class Visit>
void for_each_offset(const Tensor& tensor, Visit&& visit) {
  Shape index(tensor.shape().size(), 0);
  for (std::int64_t flat = 0; flat < tensor.numel(); ++flat) {
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis < index.size(); ++axis) offset += index[axis] * tensor.strides()[axis];
    visit(offset, static_cast<std::size_t>(flat));
    for (std::size_t axis = index.size(); axis-- > 0;) {
      if (++index[axis] < tensor.shape()[axis]) break;
      index[axis] = 0;
    }
  }
}

inline std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  if (values.empty()) return values;
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const T* data = tensor.data<T>();
    for_each_offset(tensor, [&](std::int64_t offset, std::size_t i) { values[i] = static_cast<double>(data[offset]); });
  });
  return values;
}

/// Writes values, rounded to the tensor's dtype, into any view.
inline void set_values(const Tensor& tensor, const std::vector<double>& values) {
  ISOMER_CHECK(static_cast<std::size_t>(tensor.numel()) == values.size(), "{} values for shape {}", values.size(),
               to_string(tensor.shape()));
  if (values.empty()) return;
  visit_dtype(tensor.dtype(), [&]<class T>() {
    T* data = tensor.data<T>();
    for_each_offset(tensor, [&](std::int64_t offset, std::size_t i) { data[offset] = static_cast<T>(values[i]); });
  });
}

inline Tensor tensor_of(const std::vector<double>& values, DType dtype, Shape shape) {
  const Tensor tensor = Tensor::unrecorded("test", dtype, std::move(shape));
  set_values(tensor, values);
  return tensor;
}

/// The same values after one rounding to `dtype`: what a twin must be given.
inline std::vector<double> rounded(std::vector<double> values, DType dtype) {
  visit_dtype(dtype, [&]<class T>() {
    for (double& value : values) value = static_cast<double>(static_cast<T>(value));
  });
  return values;
}

/// A number in [−√3, √3), of variance 1, by (seed, index) alone.
inline double noise(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + index * 0xbf58476d1ce4e5b9u + 1;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
  return (static_cast<double>(x >> 11) * 0x1p-53 - 0.5) * 2 * std::sqrt(3.0);
}

inline std::vector<double> noise_values(std::uint64_t seed, std::int64_t count, double scale = 1, double mean = 0) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + scale * noise(seed, i);
  return values;
}

/// Largest |difference|; infinite for another size, and where one side is NaN or infinite and the other not the same.
inline double max_difference(const std::vector<double>& actual, const std::vector<double>& expected) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  if (actual.size() != expected.size()) return kInf;
  double largest = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    if (!std::isfinite(actual[i]) || !std::isfinite(expected[i])) return kInf;
    largest = std::max(largest, std::abs(actual[i] - expected[i]));
  }
  return largest;
}

inline double max_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

/// Largest difference, relative to the largest expected value.
inline double max_relative_difference(const std::vector<double>& actual, const std::vector<double>& expected) {
  const double largest = max_magnitude(expected), difference = max_difference(actual, expected);
  return largest > 0 ? difference / largest : difference;
}

}  // namespace isomer::testing
