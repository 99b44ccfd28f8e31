#include "cost/op_cost.h"

#include <algorithm>

namespace isomer {

OpCost matmul_cost(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k, DType in, DType out) {
  const auto b = static_cast<double>(batch), dm = static_cast<double>(m), dn = static_cast<double>(n),
             dk = static_cast<double>(k);
  return {2 * b * dm * dn * dk, b * (dm * dk + dk * dn) * static_cast<double>(size_of(in)),
          b * dm * dn * static_cast<double>(size_of(out))};
}

OpCost elementwise_cost(std::int64_t elements, double flops_per_element, double reads, double writes, DType dtype) {
  const auto n = static_cast<double>(elements);
  const auto e = static_cast<double>(size_of(dtype));
  return {n * flops_per_element, n * reads * e, n * writes * e};
}

std::int64_t causal_pairs(std::int64_t query_position, std::int64_t query_length, std::int64_t key_position,
                          std::int64_t key_length) {
  // Query at position s sees clamp(s − key_position + 1, 0, key_length) keys: none, then a ramp, then all.
  const std::int64_t first = query_position - key_position + 1;  // of the first query, unclamped
  const std::int64_t ramp_begin = std::clamp<std::int64_t>(1 - first, 0, query_length);
  const std::int64_t ramp_end = std::clamp<std::int64_t>(key_length - first, ramp_begin, query_length);
  const std::int64_t ramp = ramp_end - ramp_begin;
  const std::int64_t sum = ramp * (first + ramp_begin) + ramp * (ramp - 1) / 2;
  return sum + (query_length - ramp_end) * key_length;
}

OpCost attention_forward_cost(std::int64_t num_heads, std::int64_t pairs, std::int64_t key_width,
                              std::int64_t value_width, double tensor_bytes) {
  const auto hp = static_cast<double>(num_heads) * static_cast<double>(pairs);
  return {2 * hp * static_cast<double>(key_width + value_width), tensor_bytes, 0};
}

OpCost attention_backward_cost(std::int64_t num_heads, std::int64_t pairs, std::int64_t key_width,
                               std::int64_t value_width, double tensor_bytes) {
  const auto hp = static_cast<double>(num_heads) * static_cast<double>(pairs);
  return {2 * hp * static_cast<double>(3 * key_width + 2 * value_width), tensor_bytes, 0};
}

}  // namespace isomer
