// What this processor can do. The one place that asks; kernels are chosen by the answer at run time.
#pragma once

namespace isomer {

struct CpuFeatures {
  bool avx2 = false;        // with FMA
  bool avx512 = false;      // F, BW, DQ, VL
  bool avx512bf16 = false;  // the above and BF16
};

const CpuFeatures& cpu_features();

}  // namespace isomer
