// Seeded values: each depends only on (seed, tensor name, global index), so any slice, any dtype and any number of
// threads gives the same value. Counter-based: a hash of the index gives two uniforms, Box-Muller makes them two
// normals, all in float64 with correctly rounded operations only, hence the same bits on every processor.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace isomer {

struct NormalDistribution {
  double mean = 0;
  double stddev = 1;
};

/// Element `begin` + i of the tensor called `name` goes to out[i], i in [0, count), rounded once from float64.
void fill_seeded(std::uint64_t seed, std::string_view name, std::int64_t begin, std::int64_t count,
                 const NormalDistribution& distribution, DType dtype, void* out);

/// A whole contiguous tensor, large ones on up to two threads. Does nothing for a shape-only tensor.
void fill_seeded(std::uint64_t seed, std::string_view name, const NormalDistribution& distribution,
                 const Tensor& tensor);

}  // namespace isomer
