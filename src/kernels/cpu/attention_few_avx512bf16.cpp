// Forward attention of up to four columns (queries times heads of a group) over many keys, as in decode with grouped
// queries: AVX-512 BF16. The blocked core holds columns in lanes, of which so few would fill a fraction. Here lanes lie
// along the width: a logit is a sum over lanes, 16 keys' sums are reduced together, and rows are read where they lie.
#include <cstring>

#include "kernels/cpu/attention_blocks.h"
#include "kernels/cpu/vector_avx512.h"

namespace isomer {

namespace {

using attention_blocks::kInfinity;
using attention_blocks::kLn2;
using attention_blocks::kLog2E;
using attention_blocks::round_up;
using attention_blocks::Scratch;
using attention_blocks::smaller;

struct FewPairs : Avx512 {
  using Storage = Half;
  static constexpr int kPack = 2;
};
using V = FewPairs::V;
using Half = FewPairs::Half;

constexpr std::int64_t kMaxFew = 4;      // columns
constexpr std::int64_t kBlock = 128;     // keys between two looks at the maximum
constexpr std::int64_t kWide = 32;       // elements of a vector
constexpr std::int64_t kKeysAhead = 32;  // rows are fetched so far ahead

struct FewBuffers {
  FewBuffers(const AttentionShape& s, Scratch& scratch)
      : logits(scratch.take<float>(kMaxFew * kBlock)),
        p(scratch.take<Half>(kMaxFew * kBlock)),
        out(scratch.take<float>(kMaxFew * s.value_width)),
        row(scratch.take<float>(s.value_width)) {}
  float* logits;  // [columns][kBlock], times scale · log2(e)
  Half* p;        // [columns][kBlock], bfloat16
  float* out;     // [columns][value_width], not yet divided; each 32 in the order of interleaved halves
  float* row;     // [value_width]
};

struct Column {
  const Half* q;
  std::int64_t row, head;
  std::int32_t position, segment;
  float maximum = -kInfinity, sum = 0;  // the maximum of logits times log2(e)
};

__m512bh load_pairs(const Half* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }

/// Lane i is the sum of x[i]'s lanes.
V sums_of_16(const V (&x)[16]) {
  V fours[4];
  for (int i = 0; i < 4; ++i) {
    const V a = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
    const V b =
        _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
    fours[i] = _mm512_add_ps(_mm512_castsi512_ps(unpack_low64(a, b)), _mm512_castsi512_ps(unpack_high64(a, b)));
  }
  // fours[i]: 128-bit lane l holds what lane l of x[4i] … x[4i + 3] sums to.
  const V low =
      _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44), _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
  const V high =
      _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44), _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

/// Scaled logits of the keys [begin, begin + count), −∞ where a column does not see a key and up to whole vectors.
template <int C>
void multiply_keys(const AttentionProblem& p, std::int64_t kv_head, Column (&columns)[C], std::int64_t begin,
                   std::int64_t count, float* logits) {
  const std::int64_t width = p.shape.key_width;
  const V scale = _mm512_set1_ps(static_cast<float>(p.scale) * kLog2E);
  for (std::int64_t first = 0; first < count; first += 16) {
    V sums[C][16];
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int64_t key = begin + smaller(first + i, count - 1);
      const Half* k = p.k[0].at<const Half>(p.keys.row[key], kv_head);
      const auto* ahead = reinterpret_cast<const char*>(
          p.k[0].at<const Half>(p.keys.row[smaller(key + kKeysAhead, p.keys.size - 1)], kv_head));
      V sum[C];
      for (int c = 0; c < C; ++c) sum[c] = _mm512_setzero_ps();
      for (std::int64_t j = 0; j < width; j += kWide) {
        _mm_prefetch(ahead + 2 * j, _MM_HINT_T0);
        const __m512bh pairs = load_pairs(k + j);
        for (int c = 0; c < C; ++c) sum[c] = _mm512_dpbf16_ps(sum[c], load_pairs(columns[c].q + j), pairs);
      }
      for (int c = 0; c < C; ++c) sums[c][i] = sum[c];
    }
    const std::int64_t here = smaller(16, count - first);
    const __m512i position = _mm512_maskz_loadu_epi32(FewPairs::first(here), p.keys.position + begin + first);
    const __m512i segment = _mm512_maskz_loadu_epi32(FewPairs::first(here), p.keys.segment + begin + first);
    for (int c = 0; c < C; ++c) {
      const __mmask16 seen = _mm512_mask_cmpeq_epi32_mask(
          _mm512_mask_cmple_epi32_mask(FewPairs::first(here), position, _mm512_set1_epi32(columns[c].position)),
          segment, _mm512_set1_epi32(columns[c].segment));
      const V scaled = _mm512_mul_ps(sums_of_16(sums[c]), scale);
      _mm512_storeu_ps(logits + c * kBlock + first, _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), seen, scaled));
    }
  }
}

/// Follows a column's maximum, rescales what it has, and turns its logits into P. False if it sees none of the keys.
bool exponentiate_keys(Column& column, std::int64_t count, const float* logits, Half* p, float* out,
                       std::int64_t value_width) {
  V largest = _mm512_set1_ps(-kInfinity);
  for (std::int64_t i = 0; i < count; i += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(logits + i));
  const float block = _mm512_reduce_max_ps(largest);
  const bool any = block > -kInfinity;
  if (block > column.maximum) {
    const V change = attention_blocks::exp2<FewPairs>(_mm512_set1_ps(column.maximum - block));
    column.sum *= _mm512_cvtss_f32(change);
    for (std::int64_t i = 0; i < value_width; i += 16) {
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), change));
    }
    column.maximum = block;
  }
  V total = _mm512_setzero_ps();
  const V reference = _mm512_set1_ps(any ? column.maximum : 0);
  for (std::int64_t i = 0; i < count; i += 16) {
    const V x = attention_blocks::exp2<FewPairs>(_mm512_sub_ps(_mm512_loadu_ps(logits + i), reference));
    total = _mm512_add_ps(total, x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  column.sum += FewPairs::sum(total);
  return any;
}

/// out += P · V of NV vectors of columns from `at` on; p is 0 behind the last key.
template <int C, int NV>
void add_values(const AttentionProblem& problem, std::int64_t kv_head, std::int64_t begin, std::int64_t count,
                const Half* p, std::int64_t at, float* out) {
  const std::int64_t width = problem.shape.value_width;
  V sums[C][2 * NV];
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < 2 * NV; ++v) sums[c][v] = _mm512_loadu_ps(out + c * width + at + 16 * v);
  const auto row = [&](std::int64_t key) {
    return problem.v.at<const Half>(problem.keys.row[smaller(key, problem.keys.size - 1)], kv_head) + at;
  };
  for (std::int64_t key = 0; key < count; key += 2) {
    const Half* even = row(begin + key);
    const Half* odd = key + 1 < count ? row(begin + key + 1) : even;
    const char* ahead[2] = {reinterpret_cast<const char*>(row(begin + key + kKeysAhead)),
                            reinterpret_cast<const char*>(row(begin + key + kKeysAhead + 1))};
    V pairs[C];
    for (int c = 0; c < C; ++c) {
      std::int32_t pair;
      std::memcpy(&pair, p + c * kBlock + key, sizeof pair);
      pairs[c] = _mm512_castsi512_ps(_mm512_set1_epi32(pair));
    }
    for (int v = 0; v < NV; ++v) {
      _mm_prefetch(ahead[0] + 2 * kWide * v, _MM_HINT_T0);
      _mm_prefetch(ahead[1] + 2 * kWide * v, _MM_HINT_T0);
      const __m512i a = _mm512_loadu_si512(even + kWide * v), b = _mm512_loadu_si512(odd + kWide * v);
      const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
      const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      for (int c = 0; c < C; ++c) {
        const auto weights = reinterpret_cast<__m512bh>(pairs[c]);
        sums[c][2 * v] = _mm512_dpbf16_ps(sums[c][2 * v], weights, low);
        sums[c][2 * v + 1] = _mm512_dpbf16_ps(sums[c][2 * v + 1], weights, high);
      }
    }
  }
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < 2 * NV; ++v) _mm512_storeu_ps(out + c * width + at + 16 * v, sums[c][v]);
}

/// Divides by the sum, puts the elements in order, and writes them and the LSE.
void finish_column(const AttentionProblem& p, const ForwardTask& task, const Column& column, std::int64_t index,
                   const FewBuffers& b) {
  const std::int64_t width = p.shape.value_width;
  const float* from = b.out + index * width;
  for (std::int64_t at = 0; at < width; at += kWide) {
    for (std::int64_t eight = 0; eight < 4; ++eight) {
      std::memcpy(b.row + at + 8 * eight, from + at + 4 * eight, 16);
      std::memcpy(b.row + at + 8 * eight + 4, from + at + 16 + 4 * eight, 16);
    }
  }
  const bool empty = column.sum == 0;
  const float lse = empty ? -kInfinity : column.maximum * kLn2 + __builtin_logf(column.sum);
  const float factor = empty ? 0 : 1 / column.sum;
  if (task.partial_out != nullptr) {
    attention_blocks::write_row_as<FewPairs>(static_cast<FewPairs::Unit*>(task.partial_out) + index * width, b.row,
                                             width, factor, false);
    static_cast<float*>(task.partial_lse)[index] = lse;
  } else {
    attention_blocks::write_row<FewPairs>(p.out, column.row, column.head, b.row, factor, false);
    static_cast<float*>(p.lse)[column.head * p.lse_head_stride + column.row] = lse;
  }
}

template <int C>
void forward_few(const AttentionProblem& p, const ForwardTask& task, char* memory) {
  Scratch scratch(memory);
  const FewBuffers b(p.shape, scratch);
  const std::int64_t group = p.shape.group_size(), width = p.shape.value_width;
  Column columns[C];
  for (int c = 0; c < C; ++c) {
    const std::int64_t query = (task.column_begin + c) / group, row = p.queries.row[query];
    const std::int64_t head = task.kv_head * group + (task.column_begin + c) % group;
    columns[c] = {p.q[0].at<const Half>(row, head), row, head, p.queries.position[query], p.queries.segment[query]};
  }
  for (std::int64_t i = 0; i < C * width; ++i) b.out[i] = 0;
  for (std::int64_t begin = task.key_begin; begin < task.key_end; begin += kBlock) {
    const std::int64_t count = smaller(kBlock, task.key_end - begin);
    multiply_keys<C>(p, task.kv_head, columns, begin, count, b.logits);
    bool any = false;
    for (int c = 0; c < C; ++c) {
      any |= exponentiate_keys(columns[c], count, b.logits + c * kBlock, b.p + c * kBlock, b.out + c * width, width);
    }
    if (!any) continue;
    std::int64_t at = 0;
    for (; at + 2 * kWide <= width; at += 2 * kWide) add_values<C, 2>(p, task.kv_head, begin, count, b.p, at, b.out);
    if (at < width) add_values<C, 1>(p, task.kv_head, begin, count, b.p, at, b.out);
  }
  for (int c = 0; c < C; ++c) finish_column(p, task, columns[c], c, b);
}

void forward(const AttentionProblem& problem, const ForwardTask& task, char* scratch) {
  switch (task.num_columns) {
    case 1: return forward_few<1>(problem, task, scratch);
    case 2: return forward_few<2>(problem, task, scratch);
    case 3: return forward_few<3>(problem, task, scratch);
    default: return forward_few<4>(problem, task, scratch);
  }
}

std::int64_t scratch_bytes(const AttentionShape& shape) {
  Scratch scratch(nullptr);
  const FewBuffers buffers(shape, scratch);
  return scratch.bytes();
}

}  // namespace

/// Backward there is nothing to gain: as the blocked core does it.
const AttentionBlockKernels kAttentionFewAvx512Bf16 = {
    [](const AttentionShape&) { return kMaxFew; },
    [](const AttentionShape& s) { return kAttentionAvx512Bf16.backward_block_columns(s); },
    scratch_bytes,
    [](const AttentionShape& s) { return kAttentionAvx512Bf16.backward_scratch_bytes(s); },
    forward,
    [](const AttentionProblem& p, const BackwardTask& task, char* scratch) {
      kAttentionAvx512Bf16.backward(p, task, scratch);
    },
};

}  // namespace isomer
