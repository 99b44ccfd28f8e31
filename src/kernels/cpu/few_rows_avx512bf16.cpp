#include "kernels/cpu/few_rows.h"

#include <immintrin.h>

namespace isomer::cpu {

namespace {

constexpr std::int64_t kLanes = 32;    // bfloat16 elements of a vector
constexpr std::int64_t kChains = 4;    // independent sums: a product takes several cycles
constexpr std::int64_t kAhead = 2048;  // bytes that the stream of W is fetched ahead

inline __m512bh load(const std::uint16_t* at) { return (__m512bh)_mm512_loadu_si512(at); }
inline __m512bh load_first(const std::uint16_t* at, std::int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((std::uint64_t{1} << count) - 1), at);
}

/// By halves. GCC 12 takes its own reduction for one of undefined values.
inline float sum_of_lanes(__m512 x) {
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline void put(const FewRowsParams& p, std::int64_t row, std::int64_t column, float sum) {
  const std::int64_t at = row * p.ldc + column;
  if (p.float_result) {
    float* c = static_cast<float*>(p.c) + at;
    *c = p.accumulate ? *c + sum : sum;
  } else {
    const __m128i rounded = (__m128i)_mm_cvtneps_pbh(_mm_set_ss(sum));
    static_cast<std::uint16_t*>(p.c)[at] = static_cast<std::uint16_t>(_mm_extract_epi16(rounded, 0));
  }
}

template <int M>
void columns(const FewRowsParams& p) {
  const std::int64_t whole = p.k / (kLanes * kChains) * (kLanes * kChains);
  for (std::int64_t column = 0; column < p.n; ++column) {
    const std::uint16_t* b = p.b + column * p.ldb;
    __m512 sum[M][kChains];
    for (int m = 0; m < M; ++m)
      for (int chain = 0; chain < kChains; ++chain) sum[m][chain] = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < whole; i += kLanes * kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) {
        const std::int64_t at = i + chain * kLanes;
        _mm_prefetch(reinterpret_cast<const char*>(b + at) + kAhead, _MM_HINT_T0);
        const __m512bh w = load(b + at);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) sum[m][chain] = _mm512_dpbf16_ps(sum[m][chain], load(p.a + m * p.lda + at), w);
      }
    }
    for (std::int64_t i = whole; i < p.k; i += kLanes) {
      const std::int64_t left = p.k - i < kLanes ? p.k - i : kLanes;
      const __m512bh w = load_first(b + i, left);
      for (int m = 0; m < M; ++m) sum[m][0] = _mm512_dpbf16_ps(sum[m][0], load_first(p.a + m * p.lda + i, left), w);
    }
    for (int m = 0; m < M; ++m) {
      const __m512 total = _mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]), _mm512_add_ps(sum[m][2], sum[m][3]));
      put(p, m, column, sum_of_lanes(total));
    }
  }
}

}  // namespace

void few_rows_avx512bf16(const FewRowsParams& p) {
  switch (p.m) {
    case 1: return columns<1>(p);
    case 2: return columns<2>(p);
    case 3: return columns<3>(p);
    default: return columns<4>(p);
  }
}

}  // namespace isomer::cpu
