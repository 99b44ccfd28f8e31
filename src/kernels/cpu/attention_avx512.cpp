// Attention blocks for AVX-512: float32 products, of float32 or bfloat16 storage.
#include "kernels/cpu/attention_blocks_backward.h"
#include "kernels/cpu/attention_float_units.h"
#include "kernels/cpu/vector_avx512.h"

namespace isomer {

namespace {
struct Avx512Float : FloatUnits<Avx512> {
  using Storage = Avx512::Unit;
};
struct Avx512Half : FloatUnits<Avx512> {
  using Storage = Avx512::Half;
};
}  // namespace

const AttentionBlockKernels kAttentionAvx512 = attention_blocks::kernels_of<Avx512Float>();
const AttentionBlockKernels kAttentionAvx512StorageBf16 = attention_blocks::kernels_of<Avx512Half>();

}  // namespace isomer
