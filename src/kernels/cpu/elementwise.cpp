#include "kernels/cpu/elementwise.h"

namespace isomer::cpu {

#define ISOMER_DECLARE_TARGET(target)       \
  namespace target {                        \
  extern const RowKernels<float> kFloat32;  \
  extern const RowKernels<bf16> kBfloat16;  \
  extern const RowKernels<double> kFloat64; \
  }
ISOMER_DECLARE_TARGET(avx512)
ISOMER_DECLARE_TARGET(avx2)
ISOMER_DECLARE_TARGET(baseline)
#undef ISOMER_DECLARE_TARGET

namespace {

enum class Level { baseline, avx2, avx512 };

Level level() {
  static const Level found = [] {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return Level::avx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? Level::avx2 : Level::baseline;
  }();
  return found;
}

template <class Kernels>
const Kernels& pick(const Kernels& with_avx512, const Kernels& with_avx2, const Kernels& without) {
  if (level() == Level::avx512) return with_avx512;
  return level() == Level::avx2 ? with_avx2 : without;
}

}  // namespace

template <>
const RowKernels<float>& row_kernels<float>() {
  return pick(avx512::kFloat32, avx2::kFloat32, baseline::kFloat32);
}
template <>
const RowKernels<bf16>& row_kernels<bf16>() {
  return pick(avx512::kBfloat16, avx2::kBfloat16, baseline::kBfloat16);
}
template <>
const RowKernels<double>& row_kernels<double>() {
  return pick(avx512::kFloat64, avx2::kFloat64, baseline::kFloat64);
}

const char* row_kernels_instruction_set() {
  if (level() == Level::avx512) return "avx512";
  return level() == Level::avx2 ? "avx2" : "baseline";
}

}  // namespace isomer::cpu
