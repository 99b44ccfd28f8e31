// Linear layers and norms over rows in float64, with their gradients by checkpoint name: what the reference blocks are
// made of.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace isomer::reference {

using Values = std::vector<double>;
using NamedValues = std::map<std::string, Values>;

/// Throws std::invalid_argument naming `name` if `values` is not of this shape (or empty, where it is optional).
void check_size(std::string_view name, const Values& values, const Shape& shape, bool optional);

/// x [rows, in] · weightᵀ (+ bias) for a weight [out, in]; an empty bias is none.
Values linear(const Values& x, const Values& weight, const Values& bias, std::int64_t num_rows, int num_threads);

struct LinearBackward {
  const Values& dy;      // [rows, out]
  const Values& x;       // [rows, in]
  const Values& weight;  // [out, in]
  const Values& bias;    // [out], or empty
  std::string name;      // "self_attn.q_proj"; gradients get ".weight" and ".bias"
  std::int64_t num_rows = 0;
};
/// Enters the gradients of weight and bias; adds dy · weight to dx [rows, in].
void linear_backward(const LinearBackward& params, Values& dx, NamedValues& gradients, int num_threads);

/// RMSNorm of rows as wide as the weight.
Values norm(const Values& x, const Values& weight, double eps);
/// Enters the gradient of the norm's weight under name + ".weight"; returns that of its input.
Values norm_backward(const Values& dy, const Values& x, const Values& weight, double eps, const std::string& name,
                     NamedValues& gradients);

}  // namespace isomer::reference
