// What an operation costs, by its shape: FLOPs and the bytes it must read and write at least. The only owner of such
// formulas; kernels enter them in the record, and the planner prices them.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/record.h"

namespace isomer {

/// c[m, n] (+)= a[m, k]·b[k, n], `batch` times.
OpCost matmul_cost(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k, DType in, DType out);

/// Elementwise work: `elements` results, `reads` and `writes` tensors of that many elements.
OpCost elementwise_cost(std::int64_t elements, double flops_per_element, double reads, double writes, DType dtype);

/// Query-key pairs of one causal run pair: queries at positions [query_position, +query_length), keys likewise.
std::int64_t causal_pairs(std::int64_t query_position, std::int64_t query_length, std::int64_t key_position,
                          std::int64_t key_length);

/// Attention over `pairs` query-key pairs per head: 2·pairs·(key_width + value_width) forward; the backward of a
/// recomputing core adds the scores again: 2·pairs·(3·key_width + 2·value_width).
OpCost attention_forward_cost(std::int64_t num_heads, std::int64_t pairs, std::int64_t key_width,
                              std::int64_t value_width, double tensor_bytes);
OpCost attention_backward_cost(std::int64_t num_heads, std::int64_t pairs, std::int64_t key_width,
                               std::int64_t value_width, double tensor_bytes);

}  // namespace isomer
