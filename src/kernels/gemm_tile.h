// One matrix product on the calling thread, operands as matmul.h takes them and checked already.
#pragma once

#include "core/tensor.h"

namespace isomer {

/// c [m, n] = a [m, k]·b [k, n], or c += a·b.
void multiply_tile(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate);

}  // namespace isomer
