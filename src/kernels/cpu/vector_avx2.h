// AVX2 vectors for the attention blocks; see vector_avx512.h for what each function means.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace isomer {
namespace {

struct Avx2 {
  using V = __m256;
  using Unit = float __attribute__((may_alias));
  using Half = std::uint16_t __attribute__((may_alias));
  static constexpr int kLanes = 8;
  static constexpr int kVectors = 2;
  static constexpr int kRows = 4;

  static __m256i first(std::int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > 8 ? 8 : n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static V zero() { return _mm256_setzero_ps(); }
  static V set(float x) { return _mm256_set1_ps(x); }
  static V load(const Unit* p) { return _mm256_loadu_ps(p); }
  static void store(Unit* p, V x) { _mm256_storeu_ps(p, x); }
  static V load_first(const Unit* p, std::int64_t n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_first(Unit* p, V x, std::int64_t n) { _mm256_maskstore_ps(p, first(n), x); }
  static V load_first(const Half* p, std::int64_t n) {
    __m128i half;
    if (n >= 8) {
      half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    } else {
      std::uint16_t buffer[8] = {};
      for (std::int64_t i = 0; i < n; ++i) buffer[i] = p[i];
      half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(buffer));
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store_first(Half* p, V x, std::int64_t n) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    if (n >= 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
      return;
    }
    std::uint16_t buffer[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(buffer), half);
    for (std::int64_t i = 0; i < n; ++i) p[i] = buffer[i];
  }

  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fms(V a, V b, V c) { return _mm256_fmsub_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static float sum(V x) {
    float lanes[8];
    _mm256_storeu_ps(lanes, x);
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }
  static bool any_greater(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
  static V select_greater(V a, V b, V x, V y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }

  static __m256i seen(const std::int32_t* positions, const std::int32_t* segments, std::int32_t key_position,
                      std::int32_t key_segment) {
    const __m256i later = _mm256_cmpgt_epi32(_mm256_set1_epi32(key_position),
                                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions)));
    const __m256i same = _mm256_cmpeq_epi32(_mm256_set1_epi32(key_segment),
                                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(segments)));
    return _mm256_andnot_si256(later, same);
  }
  static V mask_unseen(V x, const std::int32_t* positions, const std::int32_t* segments, std::int32_t key_position,
                       std::int32_t key_segment) {
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x,
                            _mm256_castsi256_ps(seen(positions, segments, key_position, key_segment)));
  }
  static bool any_seen(const std::int32_t* positions, const std::int32_t* segments, std::int32_t key_position,
                       std::int32_t key_segment) {
    return _mm256_movemask_epi8(seen(positions, segments, key_position, key_segment)) != 0;
  }

  static V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// For n ≤ 127; below 2^−126 the result is 0.
  static V scale_by_power(V x, V n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const V power = _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    return select_greater(n, set(-126.5f), _mm256_mul_ps(x, power), _mm256_mul_ps(x, zero()));
  }

  /// dst[c][r] = src[r][c], 8 × 8.
  static void transpose(const Unit* src, std::int64_t src_stride, Unit* dst, std::int64_t dst_stride) {
    V a[8];
    V b[8];
    for (int r = 0; r < 8; ++r) a[r] = load(src + r * src_stride);
    for (int r = 0; r < 8; r += 2) {
      b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
      b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
    }
    for (int r = 0; r < 8; r += 4) {
      a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44);
      a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xee);
      a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44);
      a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      store(dst + j * dst_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
      store(dst + (4 + j) * dst_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
    }
  }
};

}  // namespace
}  // namespace isomer
