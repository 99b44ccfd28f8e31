// One single-threaded matrix product of a library. Primitives are cached by shape, strides and types.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace isomer::cpu {

struct GemmOperand {
  const void* data;
  std::int64_t ld;  // distance of rows, or of columns where transposed
  bool transposed;  // unit stride along the first axis
};

struct GemmParams {
  std::int64_t m, n, k;
  DType in, out;
  GemmOperand a;  // [m, k]
  GemmOperand b;  // [k, n]
  void* c;        // [m, n], unit stride along n
  std::int64_t ldc;
  bool accumulate;
};

/// How bfloat16 operands are multiplied: as the library does where it can on this processor, or widened to float32
/// first, which every processor can.
enum class Bf16Products : std::uint8_t { best, widened };

/// c (+)= a·b on the calling thread.
void gemm(const GemmParams& params, Bf16Products bf16_products = Bf16Products::best);
std::string describe_gemm(DType in, DType out);

/// Makes libraries work on the calling thread alone: OpenMP regions inside oneDNN, which called from own threads would
/// fall to a third of its speed, and OpenBLAS. Idempotent and cheap; every thread calls it before it calls a library.
void use_one_library_thread();

}  // namespace isomer::cpu
