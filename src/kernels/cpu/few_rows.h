// Products of very few rows with a matrix whose columns are contiguous (y = x·Wᵀ of one decode step): bound by reading
// W once, which libraries that pack it first can't be.
#pragma once

#include <cstdint>

namespace isomer::cpu {

inline constexpr std::int64_t kFewRows = 4;

/// c [m, n] (+)= a [m, k]·bᵀ, b [n, k], bfloat16 bits; unit strides along k and along n. m ≤ kFewRows.
struct FewRowsParams {
  std::int64_t m, n, k;
  const std::uint16_t* a;
  std::int64_t lda;
  const std::uint16_t* b;
  std::int64_t ldb;
  void* c;  // float, or bfloat16 bits
  std::int64_t ldc;
  bool float_result;
  bool accumulate;  // into float alone
};

/// AVX-512 BF16: products of pairs, float32 sums over fixed lanes.
void few_rows_avx512bf16(const FewRowsParams& params);

}  // namespace isomer::cpu
