// Attention blocks for any processor with AVX2 and FMA: float32 products, of float32 or bfloat16 storage.
#include "kernels/cpu/attention_blocks_backward.h"
#include "kernels/cpu/attention_float_units.h"
#include "kernels/cpu/vector_avx2.h"

namespace isomer {

namespace {
struct Avx2Float : FloatUnits<Avx2> {
  using Storage = Avx2::Unit;
};
struct Avx2Half : FloatUnits<Avx2> {
  using Storage = Avx2::Half;
};
}  // namespace

const AttentionBlockKernels kAttentionAvx2 = attention_blocks::kernels_of<Avx2Float>();
const AttentionBlockKernels kAttentionAvx2StorageBf16 = attention_blocks::kernels_of<Avx2Half>();

}  // namespace isomer
