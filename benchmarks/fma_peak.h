// The multiply-add rate of this processor, measured: twelve independent chains held in registers. The peak that
// benchmarks quote shares of; measure it beside what is timed, since the machine's clock drifts.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "core/cpu_features.h"
#include "core/dtype.h"
#include "core/record.h"

namespace isomer {

inline constexpr int kPeakChains = 12;  // in assembly: compilers spill arrays of vectors

__attribute__((target("avx2,fma"))) inline float fma_chains_avx2(long steps) {
  const __m256 x = _mm256_set1_ps(0.001f);
  __m256 s0 = x, s1 = x, s2 = x, s3 = x, s4 = x, s5 = x, s6 = x, s7 = x, s8 = x, s9 = x, s10 = x, s11 = x;
  for (long i = 0; i < steps; ++i) {
    asm volatile(
        "vfmadd231ps %[x], %[x], %[s0]\n"
        "vfmadd231ps %[x], %[x], %[s1]\n"
        "vfmadd231ps %[x], %[x], %[s2]\n"
        "vfmadd231ps %[x], %[x], %[s3]\n"
        "vfmadd231ps %[x], %[x], %[s4]\n"
        "vfmadd231ps %[x], %[x], %[s5]\n"
        "vfmadd231ps %[x], %[x], %[s6]\n"
        "vfmadd231ps %[x], %[x], %[s7]\n"
        "vfmadd231ps %[x], %[x], %[s8]\n"
        "vfmadd231ps %[x], %[x], %[s9]\n"
        "vfmadd231ps %[x], %[x], %[s10]\n"
        "vfmadd231ps %[x], %[x], %[s11]\n"
        : [s0] "+x"(s0), [s1] "+x"(s1), [s2] "+x"(s2), [s3] "+x"(s3), [s4] "+x"(s4), [s5] "+x"(s5), [s6] "+x"(s6),
          [s7] "+x"(s7), [s8] "+x"(s8), [s9] "+x"(s9), [s10] "+x"(s10), [s11] "+x"(s11)
        : [x] "x"(x));
  }
  return _mm256_cvtss_f32(s0);
}

__attribute__((target("avx512f"))) inline float fma_chains_avx512(long steps) {
  const __m512 x = _mm512_set1_ps(0.001f);
  __m512 s0 = x, s1 = x, s2 = x, s3 = x, s4 = x, s5 = x, s6 = x, s7 = x, s8 = x, s9 = x, s10 = x, s11 = x;
  for (long i = 0; i < steps; ++i) {
    asm volatile(
        "vfmadd231ps %[x], %[x], %[s0]\n"
        "vfmadd231ps %[x], %[x], %[s1]\n"
        "vfmadd231ps %[x], %[x], %[s2]\n"
        "vfmadd231ps %[x], %[x], %[s3]\n"
        "vfmadd231ps %[x], %[x], %[s4]\n"
        "vfmadd231ps %[x], %[x], %[s5]\n"
        "vfmadd231ps %[x], %[x], %[s6]\n"
        "vfmadd231ps %[x], %[x], %[s7]\n"
        "vfmadd231ps %[x], %[x], %[s8]\n"
        "vfmadd231ps %[x], %[x], %[s9]\n"
        "vfmadd231ps %[x], %[x], %[s10]\n"
        "vfmadd231ps %[x], %[x], %[s11]\n"
        : [s0] "+v"(s0), [s1] "+v"(s1), [s2] "+v"(s2), [s3] "+v"(s3), [s4] "+v"(s4), [s5] "+v"(s5), [s6] "+v"(s6),
          [s7] "+v"(s7), [s8] "+v"(s8), [s9] "+v"(s9), [s10] "+v"(s10), [s11] "+v"(s11)
        : [x] "v"(x));
  }
  return _mm512_cvtss_f32(s0);
}

__attribute__((target("avx512f,avx512bf16"))) inline float fma_chains_bf16(long steps) {
  const __m512 x = _mm512_castsi512_ps(_mm512_set1_epi32(0x3a003a00));
  __m512 s0 = x, s1 = x, s2 = x, s3 = x, s4 = x, s5 = x, s6 = x, s7 = x, s8 = x, s9 = x, s10 = x, s11 = x;
  for (long i = 0; i < steps; ++i) {
    asm volatile(
        "vdpbf16ps %[x], %[x], %[s0]\n"
        "vdpbf16ps %[x], %[x], %[s1]\n"
        "vdpbf16ps %[x], %[x], %[s2]\n"
        "vdpbf16ps %[x], %[x], %[s3]\n"
        "vdpbf16ps %[x], %[x], %[s4]\n"
        "vdpbf16ps %[x], %[x], %[s5]\n"
        "vdpbf16ps %[x], %[x], %[s6]\n"
        "vdpbf16ps %[x], %[x], %[s7]\n"
        "vdpbf16ps %[x], %[x], %[s8]\n"
        "vdpbf16ps %[x], %[x], %[s9]\n"
        "vdpbf16ps %[x], %[x], %[s10]\n"
        "vdpbf16ps %[x], %[x], %[s11]\n"
        : [s0] "+v"(s0), [s1] "+v"(s1), [s2] "+v"(s2), [s3] "+v"(s3), [s4] "+v"(s4), [s5] "+v"(s5), [s6] "+v"(s6),
          [s7] "+v"(s7), [s8] "+v"(s8), [s9] "+v"(s9), [s10] "+v"(s10), [s11] "+v"(s11)
        : [x] "v"(x));
  }
  return _mm512_cvtss_f32(s0);
}

/// GFLOP/s of one thread in the widest multiply-add that the processor has for `dtype`; the best of a few short runs,
/// by processor time.
inline double fma_peak_gflops(DType dtype) {
  const CpuFeatures& cpu = cpu_features();
  const bool pairs = dtype == DType::bf16 && cpu.avx512bf16;
  const double flops_a_step = kPeakChains * (pairs ? 64.0 : cpu.avx512 ? 32.0 : 16.0);
  constexpr long kSteps = 400000;
  double best = 0;
  volatile float keep = 0;
  for (int i = 0; i < 6; ++i) {
    const double begin = thread_cpu_s();
    keep = keep + (pairs ? fma_chains_bf16(kSteps) : cpu.avx512 ? fma_chains_avx512(kSteps) : fma_chains_avx2(kSteps));
    best = std::max(best, flops_a_step * kSteps / (thread_cpu_s() - begin) * 1e-9);
  }
  return best;
}

}  // namespace isomer
