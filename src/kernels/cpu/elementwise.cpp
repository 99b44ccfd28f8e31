#include "kernels/cpu/elementwise.h"

#include "core/cpu_features.h"

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

template <class Kernels>
const Kernels& pick(InstructionSet set, const Kernels& with_avx512, const Kernels& with_avx2, const Kernels& without) {
  if (set == InstructionSet::avx512) return with_avx512;
  return set == InstructionSet::avx2 ? with_avx2 : without;
}

}  // namespace

std::string_view name_of(InstructionSet set) {
  if (set == InstructionSet::avx512) return "avx512";
  return set == InstructionSet::avx2 ? "avx2" : "baseline";
}

std::span<const InstructionSet> available_instruction_sets() {
  static constexpr InstructionSet kAll[] = {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512};
  const CpuFeatures& features = cpu_features();
  const std::size_t count = features.avx512 ? 3 : features.avx2 ? 2 : 1;
  return std::span(kAll).first(count);
}

template <>
const RowKernels<float>& row_kernels_of<float>(InstructionSet set) {
  return pick(set, avx512::kFloat32, avx2::kFloat32, baseline::kFloat32);
}
template <>
const RowKernels<bf16>& row_kernels_of<bf16>(InstructionSet set) {
  return pick(set, avx512::kBfloat16, avx2::kBfloat16, baseline::kBfloat16);
}
template <>
const RowKernels<double>& row_kernels_of<double>(InstructionSet set) {
  return pick(set, avx512::kFloat64, avx2::kFloat64, baseline::kFloat64);
}

}  // namespace isomer::cpu
