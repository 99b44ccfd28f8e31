// AVX-512 vectors for the attention blocks. Included by files compiled for AVX-512 alone; the names have internal
// linkage, so that no code for AVX-512 can stand in for a portable function.
#pragma once

// GCC 12 takes the undefined operand inside its own masked intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

namespace isomer {
namespace {

struct Avx512 {
  using V = __m512;
  using Unit = float __attribute__((may_alias));  // one 32-bit step of a product
  using Half = std::uint16_t __attribute__((may_alias));
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 2;  // in a panel
  static constexpr int kRows = 8;     // of a register block: 8 × 2 accumulators

  static __mmask16 first(std::int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u); }
  static V zero() { return _mm512_setzero_ps(); }
  static V set(float x) { return _mm512_set1_ps(x); }
  static V load(const Unit* p) { return _mm512_loadu_ps(p); }
  static void store(Unit* p, V x) { _mm512_storeu_ps(p, x); }
  static V load_first(const Unit* p, std::int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(Unit* p, V x, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static V load_first(const Half* p, std::int64_t n) {
    const __m256i half = _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  /// Rounds to bfloat16, ties to even; NaN stays NaN.
  static __m256i round_to_half(V x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  }
  static void store_first(Half* p, V x, std::int64_t n) { _mm256_mask_storeu_epi16(p, first(n), round_to_half(x)); }

  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V fms(V a, V b, V c) { return _mm512_fmsub_ps(a, b, c); }
  /// A NaN in b stays one.
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static float sum(V x) { return _mm512_reduce_add_ps(x); }

  /// a > b in any lane.
  static bool any_greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
  /// a > b ? x : y.
  static V select_greater(V a, V b, V x, V y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x); }

  /// x where the lane's column (its position and segment) sees the key, −∞ elsewhere.
  static V mask_unseen(V x, const std::int32_t* positions, const std::int32_t* segments, std::int32_t key_position,
                       std::int32_t key_segment) {
    const __mmask16 seen = _mm512_mask_cmpeq_epi32_mask(
        _mm512_cmpge_epi32_mask(_mm512_loadu_si512(positions), _mm512_set1_epi32(key_position)),
        _mm512_loadu_si512(segments), _mm512_set1_epi32(key_segment));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, x);
  }
  static bool any_seen(const std::int32_t* positions, const std::int32_t* segments, std::int32_t key_position,
                       std::int32_t key_segment) {
    return _mm512_mask_cmpeq_epi32_mask(
               _mm512_cmpge_epi32_mask(_mm512_loadu_si512(positions), _mm512_set1_epi32(key_position)),
               _mm512_loadu_si512(segments), _mm512_set1_epi32(key_segment)) != 0;
  }

  static V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// x · 2^n for whole n; below the smallest number the result is 0.
  static V scale_by_power(V x, V n) { return _mm512_scalef_ps(x, n); }

  /// dst[c][r] = src[r][c], 16 × 16.
  static void transpose(const Unit* src, std::int64_t src_stride, Unit* dst, std::int64_t dst_stride);
};

[[gnu::always_inline]] inline __m512i unpack_low64(__m512 a, __m512 b) {
  return _mm512_unpacklo_epi64(_mm512_castps_si512(a), _mm512_castps_si512(b));
}
[[gnu::always_inline]] inline __m512i unpack_high64(__m512 a, __m512 b) {
  return _mm512_unpackhi_epi64(_mm512_castps_si512(a), _mm512_castps_si512(b));
}

inline void Avx512::transpose(const Unit* src, std::int64_t src_stride, Unit* dst, std::int64_t dst_stride) {
  V a[16];
  V b[16];
  for (int r = 0; r < 16; ++r) a[r] = load(src + r * src_stride);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
  }
  // a[r + j]: 128-bit lane l holds column 4l + j of rows r … r+3.
  for (int r = 0; r < 16; r += 4) {
    a[r] = _mm512_castsi512_ps(unpack_low64(b[r], b[r + 2]));
    a[r + 1] = _mm512_castsi512_ps(unpack_high64(b[r], b[r + 2]));
    a[r + 2] = _mm512_castsi512_ps(unpack_low64(b[r + 1], b[r + 3]));
    a[r + 3] = _mm512_castsi512_ps(unpack_high64(b[r + 1], b[r + 3]));
  }
  for (int j = 0; j < 4; ++j) {
    const V low02 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);  // rows 0–7: lanes 0, 2
    const V low13 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);  // rows 0–7: lanes 1, 3
    const V high02 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    const V high13 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    store(dst + j * dst_stride, _mm512_shuffle_f32x4(low02, high02, 0x88));
    store(dst + (4 + j) * dst_stride, _mm512_shuffle_f32x4(low13, high13, 0x88));
    store(dst + (8 + j) * dst_stride, _mm512_shuffle_f32x4(low02, high02, 0xdd));
    store(dst + (12 + j) * dst_stride, _mm512_shuffle_f32x4(low13, high13, 0xdd));
  }
}

}  // namespace
}  // namespace isomer
