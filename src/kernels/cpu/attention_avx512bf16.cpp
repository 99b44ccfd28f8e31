// Attention blocks for AVX-512 BF16: products of bfloat16 pairs, summed in float32. P and dS are rounded to bfloat16
// for their products; softmax statistics are float32.
#include "kernels/cpu/attention_blocks_backward.h"
#include "kernels/cpu/vector_avx512.h"

namespace isomer {

namespace {

struct Avx512Pairs : Avx512 {
  using Storage = Half;
  static constexpr int kPack = 2;

  static V mul_add(V sum, V a, V b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static void copy_pairs(const Half* src, Unit* dst) { _mm512_storeu_si512(dst, _mm512_loadu_si512(src)); }
  /// n < 32 elements as ⌈n / 2⌉ pairs.
  static void copy_first_pairs(const Half* src, Unit* dst, std::int64_t n) {
    const __m512i x = _mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1u, src);
    _mm512_mask_storeu_epi32(dst, first((n + 1) / 2), x);
  }
  /// dst[i] = (even[i], odd[i]) for i < n, zeros beyond.
  static void interleave(const Half* even, const Half* odd, std::int64_t n, Unit* dst) {
    const __m256i low = even == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(first(n), even);
    const __m256i high = odd == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(first(n), odd);
    _mm512_storeu_si512(
        dst, _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
  }
  static void store_steps(Unit* steps, std::int64_t key, int v, V even, V odd) {
    const __m512i order = _mm512_setr_epi32(0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005,
                                            0x00160006, 0x00170007, 0x00180008, 0x00190009, 0x001a000a, 0x001b000b,
                                            0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f);
    const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_storeu_si512(steps + key / 2 * kLanes * kVectors + v * kLanes, _mm512_permutexvar_epi16(order, both));
  }
  static void store_cells(Unit* row, std::int64_t column, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<Half*>(row) + column),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
};

}  // namespace

const AttentionBlockKernels kAttentionAvx512Bf16 = attention_blocks::kernels_of<Avx512Pairs>();

}  // namespace isomer
