// Matrix products: tiles fixed by shape, each a single-threaded library call, scheduled by the rank's own pool, so
// results don't depend on the thread budget. float32 and bfloat16 go to oneDNN, float64 to OpenBLAS; up to four rows of
// bfloat16 by a matrix that stands transposed (a decode step) to a kernel of our own, which reads the matrix once.
#pragma once

#include <string_view>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// c = a·b, or c += a·b. Shapes [m, k]·[k, n] → [m, n], or the same behind one batch axis (stride 0 repeats an
/// operand). a and b have unit stride in one of their last two axes (a transposed view is fine), c in its last. Types:
/// all float32; bfloat16 operands with bfloat16 or float32 result; all float64. Sums are float32 (float64), and are
/// rounded once; accumulating into bfloat16 is refused. `name` is the operation's name in the record.
void matmul(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const Tensor& c,
            bool accumulate = false);

/// Which implementation serves these types on this processor ("onednn f32", …), and for the ones before it, why not.
std::string describe_matmul(DType in, DType out);

}  // namespace isomer
