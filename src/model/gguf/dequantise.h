// Blocks of GGUF files back into numbers. The layouts are those of the format's documentation; what each block means
// stands beside its function.
#pragma once

#include <cstdint>

#include "model/gguf.h"

namespace isomer {

/// `count` elements (whole blocks) from `from`, which needs no alignment, as float32: the same roundings as the
/// format's reference, one product and one sum at a time.
void dequantise(GgufType type, const char* from, std::int64_t count, float* to);

}  // namespace isomer
