// Every decode layout that the search looks at.
#pragma once

#include <vector>

#include "cost/decode_layout.h"

namespace isomer {

/// Every layout on up to `max_devices` devices whose axes are powers of two, of every family and their products with
/// data parallelism and pipelines; whether it fits is not looked at.
std::vector<DecodeLayout> enumerate_decode_layouts(const ModelConfig& config, int max_devices);

}  // namespace isomer
