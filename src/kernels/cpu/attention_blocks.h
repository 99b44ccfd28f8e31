// What forward and backward share: block sizes, packing, visibility and the register-blocked product. Templates over
// Isa, a vector set that also says what is stored (Storage) and how many of its elements one step of a product takes
// (kPack: 1, or 2 for pairs of bfloat16). Each Isa has internal linkage.
//
// Words. Column: one query of one head; columns stand in vector lanes, so softmax needs no horizontal sums. Panel:
// kPanel adjacent columns, for which all steps are done before the next panel. Unit: 32 bits, a float or a pair.
#pragma once

#include <cstdint>

#include "kernels/attention_problem.h"

namespace isomer::attention_blocks {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_inff();
constexpr std::int64_t kMaxColumns = 256;  // of a block
constexpr std::int64_t kMaxKeys = 128;
/// The running maximum is followed only when exceeded by this, in powers of two: probabilities stay below 2^8.
constexpr float kRescaleThreshold = 8;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <class Isa>
inline constexpr std::int64_t kPanel = std::int64_t{Isa::kLanes} * Isa::kVectors;

struct BlockSizes {
  std::int64_t columns;
  std::int64_t keys;
};

/// Hands out pieces of scratch; with a null base it only adds up sizes.
class Scratch {
 public:
  explicit Scratch(char* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(count * static_cast<std::int64_t>(sizeof(T)), 64);
    return piece;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::int64_t bytes_ = 0;
};

/// Widths in units along a reduction over the width (parts padded to whole units) and in elements.
template <class Isa>
struct Widths {
  explicit Widths(const AttentionShape& s)
      : part{s.key_width, s.rope_width},
        key(s.key_width + s.rope_width),
        value(s.value_width),
        key_units(round_up(s.key_width, Isa::kPack) / Isa::kPack + round_up(s.rope_width, Isa::kPack) / Isa::kPack),
        value_units(round_up(s.value_width, Isa::kPack) / Isa::kPack),
        key_rows(round_up(key, Isa::kLanes)),
        value_rows(round_up(value, Isa::kLanes)) {}
  std::int64_t part[2];
  std::int64_t key;
  std::int64_t value;
  std::int64_t key_units;
  std::int64_t value_units;
  std::int64_t key_rows;  // of a transposed array: whole register blocks and whole 16 × 16 transposes
  std::int64_t value_rows;
};

/// Columns [begin, begin + count) of a key/value head.
template <class Isa>
struct ColumnBlock {
  std::int64_t count = 0;
  std::int64_t num_panels = 0;
  std::int64_t row[kMaxColumns];   // tensor row of the query
  std::int64_t head[kMaxColumns];  // query head
  std::int32_t position[kMaxColumns];
  std::int32_t segment[kMaxColumns];  // beyond count: a position that sees no key
  std::int32_t position_range[2];
  std::int32_t segment_range[2];

  void fill(const AttentionProblem& p, std::int64_t kv_head, std::int64_t begin, std::int64_t num) {
    count = num;
    num_panels = round_up(num, kPanel<Isa>) / kPanel<Isa>;
    const std::int64_t group = p.shape.group_size();
    for (std::int64_t c = 0; c < num_panels * kPanel<Isa>; ++c) {
      const bool real = c < num;
      const std::int64_t query = (begin + (real ? c : 0)) / group;
      row[c] = p.queries.row[query];
      head[c] = kv_head * group + (begin + c) % group;
      position[c] = real ? p.queries.position[query] : INT32_MIN;
      segment[c] = p.queries.segment[query];
    }
    set_ranges(position, segment, count, position_range, segment_range);
  }

  static void set_ranges(const std::int32_t* position, const std::int32_t* segment, std::int64_t n,
                         std::int32_t* position_range, std::int32_t* segment_range) {
    position_range[0] = position_range[1] = position[0];
    segment_range[0] = segment_range[1] = segment[0];
    for (std::int64_t i = 1; i < n; ++i) {
      position_range[0] = position[i] < position_range[0] ? position[i] : position_range[0];
      position_range[1] = position[i] > position_range[1] ? position[i] : position_range[1];
      segment_range[0] = segment[i] < segment_range[0] ? segment[i] : segment_range[0];
      segment_range[1] = segment[i] > segment_range[1] ? segment[i] : segment_range[1];
    }
  }
};

/// Keys [begin, begin + count) and which of them each panel sees.
template <class Isa>
struct KeyBlock {
  static constexpr std::int64_t kMaxPanels = kMaxColumns / kPanel<Isa>;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  bool masked = false;             // some column does not see some key
  std::int64_t first[kMaxPanels];  // keys [first, last) of the block are computed for the panel:
  std::int64_t last[kMaxPanels];   // whole register blocks; empty where the panel sees nothing

  /// Goes to the next block of at most `step` keys from `from` on that some column sees; false if there is none.
  bool find_next(const AttentionProblem& p, const ColumnBlock<Isa>& columns, std::int64_t from, std::int64_t end,
                 std::int64_t step) {
    for (; from < end; from += step)
      if (fill(p, columns, from, smaller(step, end - from))) return true;
    return false;
  }

  /// False if no column sees any key; such a block is skipped.
  [[gnu::noinline]] bool fill(const AttentionProblem& p, const ColumnBlock<Isa>& columns, std::int64_t key_begin,
                              std::int64_t num) {
    begin = key_begin;
    count = num;
    const std::int32_t* position = p.keys.position + begin;
    const std::int32_t* segment = p.keys.segment + begin;
    std::int32_t positions[2];
    std::int32_t segments[2];
    ColumnBlock<Isa>::set_ranges(position, segment, count, positions, segments);
    if (columns.position_range[1] < positions[0] || columns.segment_range[1] < segments[0] ||
        segments[1] < columns.segment_range[0]) {
      return false;
    }
    const bool one_segment = columns.segment_range[0] == columns.segment_range[1] && segments[0] == segments[1];
    masked = !one_segment || columns.position_range[0] < positions[1];
    bool any = false;
    for (std::int64_t panel = 0; panel < columns.num_panels; ++panel) {
      first[panel] = 0;
      last[panel] = round_up(count, Isa::kRows);
      if (masked) find_seen(columns, panel, position, segment);
      any = any || first[panel] < last[panel];
    }
    return any;
  }

 private:
  void find_seen(const ColumnBlock<Isa>& columns, std::int64_t panel, const std::int32_t* position,
                 const std::int32_t* segment) {
    std::int64_t low = count;
    std::int64_t high = 0;
    for (std::int64_t key = 0; key < count; ++key) {
      bool seen = false;
      for (int v = 0; v < Isa::kVectors; ++v) {
        const std::int64_t c = panel * kPanel<Isa> + v * Isa::kLanes;
        seen = seen || Isa::any_seen(columns.position + c, columns.segment + c, position[key], segment[key]);
      }
      if (!seen) continue;
      low = smaller(low, key);
      high = key + 1;
    }
    first[panel] = high == 0 ? 0 : low / Isa::kRows * Isa::kRows;
    last[panel] = round_up(high, Isa::kRows);
  }
};

/// Brings the rows of the next key block into the second-level cache, a few keys a call, while the current one is
/// computed: rows of one head are far apart, and copying them cold costs a sixth of the time. Where few queries share
/// the block (decode) it is computed by few calls, which must bring more each (spread_over).
template <class Isa>
struct Prefetch {
  const AttentionProblem* problem = nullptr;
  std::int64_t kv_head = 0;
  std::int64_t key = 0;    // of k, brought in beside products with K
  std::int64_t value = 0;  // of v, beside products with V
  std::int64_t end = 0;
  std::int64_t keys_a_call = 1, values_a_call = 1;

  /// The rows left, over so many calls beside products with K and with V.
  void spread_over(std::int64_t key_calls, std::int64_t value_calls) {
    const auto share = [](std::int64_t rows, std::int64_t calls) { return (rows + calls - 1) / calls; };
    keys_a_call = share(end - key, values_are_keys() ? key_calls + value_calls : key_calls);
    values_a_call = values_are_keys() ? keys_a_call : share(end - value, value_calls);
  }
  void beside_keys() {
    for (std::int64_t last = smaller(end, key + keys_a_call); key < last; ++key) {
      const std::int64_t row = problem->keys.row[key];
      prefetch_row(problem->k[0], row, kv_head);
      prefetch_row(problem->k[1], row, 0);
    }
  }
  void beside_values() {
    if (problem == nullptr) return;
    if (values_are_keys()) return beside_keys();
    for (std::int64_t last = smaller(end, value + values_a_call); value < last; ++value) {
      prefetch_row(problem->v, problem->keys.row[value], kv_head);
    }
  }

 private:
  bool values_are_keys() const { return problem->v.data == problem->k[0].data; }
  static void prefetch_row(const HeadRows& x, std::int64_t row, std::int64_t head) {
    if (x.width == 0) return;
    const auto* data = reinterpret_cast<const char*>(x.template at<const typename Isa::Storage>(row, head));
    const std::int64_t bytes = x.width * static_cast<std::int64_t>(sizeof(typename Isa::Storage));
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
    __builtin_prefetch(data + bytes - 1, 0, 2);
  }
};

/// 2^x for x ≤ 2^7; exactly 0 far below.
template <class Isa>
[[gnu::always_inline]] inline typename Isa::V exp2(typename Isa::V x) {
  x = Isa::max(Isa::set(-160.0f), x);
  const auto n = Isa::round(x);
  const auto f = Isa::sub(x, n);
  typename Isa::V y;
  if constexpr (Isa::kPack == 1) {  // minimax on [−½, ½], relative error 7.5e−8
    y = Isa::fma(Isa::set(0.00132764721677491f), f, Isa::set(0.009675541331023638f));
    y = Isa::fma(y, f, Isa::set(0.05550713272875649f));
    y = Isa::fma(y, f, Isa::set(0.2402211972396915f));
    y = Isa::fma(y, f, Isa::set(0.6931469670652648f));
    y = Isa::fma(y, f, Isa::set(1.0000000716546418f));
  } else {  // the result is rounded to bfloat16: 2.6e−6 will do
    y = Isa::fma(Isa::set(0.009570102014633122f), f, Isa::set(0.05591786030632526f));
    y = Isa::fma(y, f, Isa::set(0.24024744824991626f));
    y = Isa::fma(y, f, Isa::set(0.6931218147429867f));
    y = Isa::fma(y, f, Isa::set(0.9999992614469311f));
  }
  return Isa::scale_by_power(y, n);
}

// ---- the register block ------------------------------------------------------------------------------------------

enum class ARows { strided, adjacent };

/// acc[i][lane] += Σ_s A(i, s) · b[s · kPanel + lane]; A(i, s) = a[i · stride + s] (strided) or a[s · stride + i].
template <class Isa, int NV, ARows kA>
[[gnu::always_inline]] inline void multiply(typename Isa::V (&acc)[Isa::kRows][NV], const typename Isa::Unit* a,
                                            std::int64_t stride, const typename Isa::Unit* b, std::int64_t steps) {
  for (std::int64_t s = 0; s < steps; ++s) {
    typename Isa::V bv[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) bv[v] = Isa::load(b + s * kPanel<Isa> + v * Isa::kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Isa::kRows; ++i) {
      const auto av = Isa::set(kA == ARows::strided ? a[i * stride + s] : a[s * stride + i]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[i][v] = Isa::mul_add(acc[i][v], av, bv[v]);
    }
  }
}

template <class Isa, int NV>
[[gnu::always_inline]] inline void clear(typename Isa::V (&acc)[Isa::kRows][NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < Isa::kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) acc[i][v] = Isa::zero();
}

/// c[row][lane] = Σ_u a[row][u] · b[u][lane] for rows [begin, end), whole register blocks. c has kPanel lanes a row.
template <class Isa, int NV>
[[gnu::noinline]] void multiply_rows(const typename Isa::Unit* a, std::int64_t a_stride, const typename Isa::Unit* b,
                                     std::int64_t units, typename Isa::Unit* c, std::int64_t begin, std::int64_t end,
                                     Prefetch<Isa>& prefetch) {
  for (std::int64_t row = begin; row < end; row += Isa::kRows) {
    prefetch.beside_keys();
    typename Isa::V acc[Isa::kRows][NV];
    clear<Isa, NV>(acc);
    multiply<Isa, NV, ARows::strided>(acc, a + row * a_stride, a_stride, b, units);
#pragma GCC unroll 8
    for (int i = 0; i < Isa::kRows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) Isa::store(c + (row + i) * kPanel<Isa> + v * Isa::kLanes, acc[i][v]);
  }
}

/// c[row][lane] += Σ_s a[s][row] · b[s][lane] for rows [0, num_rows), whole register blocks.
template <class Isa, int NV>
[[gnu::noinline]] void add_transposed_product(const typename Isa::Unit* a, std::int64_t a_stride,
                                              const typename Isa::Unit* b, std::int64_t steps, typename Isa::Unit* c,
                                              std::int64_t num_rows, Prefetch<Isa>& prefetch) {
  for (std::int64_t row = 0; row < num_rows; row += Isa::kRows) {
    prefetch.beside_values();
    typename Isa::V acc[Isa::kRows][NV];
    clear<Isa, NV>(acc);
    multiply<Isa, NV, ARows::adjacent>(acc, a + row, a_stride, b, steps);
#pragma GCC unroll 8
    for (int i = 0; i < Isa::kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        auto* at = c + (row + i) * kPanel<Isa> + v * Isa::kLanes;
        Isa::store(at, Isa::add(Isa::load(at), acc[i][v]));
      }
    }
  }
}

// ---- packing -------------------------------------------------------------------------------------------------------

/// One row as units for a reduction over its width: [width / kPack], the last one padded with zero.
template <class Isa>
[[gnu::always_inline]] inline void copy_row(const typename Isa::Storage* src, std::int64_t width,
                                            typename Isa::Unit* dst) {
  std::int64_t i = 0;
  if constexpr (Isa::kPack == 2) {
    for (; i + 2 * Isa::kLanes <= width; i += 2 * Isa::kLanes) Isa::copy_pairs(src + i, dst + i / 2);
    if (i < width) Isa::copy_first_pairs(src + i, dst + i / 2, width - i);
  } else {
    for (; i + Isa::kLanes <= width; i += Isa::kLanes) Isa::store(dst + i, Isa::load_first(src + i, Isa::kLanes));
    if (i < width) Isa::store_first(dst + i, Isa::load_first(src + i, width - i), width - i);
  }
}

/// The two parts of a row side by side.
template <class Isa>
[[gnu::always_inline]] inline void copy_parts(const HeadRows (&x)[2], const std::int64_t (&head)[2], std::int64_t row,
                                              typename Isa::Unit* dst) {
  using Storage = typename Isa::Storage;
  copy_row<Isa>(x[0].template at<const Storage>(row, head[0]), x[0].width, dst);
  if (x[1].width == 0) return;
  copy_row<Isa>(x[1].template at<const Storage>(row, head[1]), x[1].width,
                dst + round_up(x[0].width, Isa::kPack) / Isa::kPack);
}

template <class Isa>
[[gnu::always_inline]] inline void clear_units(typename Isa::Unit* p, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) p[i] = 0;
}

/// kPack rows as one step of a reduction over rows; a null row is zeros. dst: [width rounded up to kLanes].
template <class Isa>
[[gnu::always_inline]] inline void interleave_rows(const typename Isa::Storage* even, const typename Isa::Storage* odd,
                                                   std::int64_t width, typename Isa::Unit* dst) {
  for (std::int64_t i = 0; i < width; i += Isa::kLanes) {
    Isa::interleave(even == nullptr ? nullptr : even + i, odd == nullptr ? nullptr : odd + i,
                    smaller(width - i, Isa::kLanes), dst + i);
  }
}

/// dst[panel][unit][lane] of columns; `rows` units a panel (whole transposes). `temp`: [kPanel, rows].
template <class Isa, class CopyColumn>
[[gnu::noinline]] void pack_transposed(const ColumnBlock<Isa>& columns, std::int64_t units, std::int64_t rows,
                                       typename Isa::Unit* temp, typename Isa::Unit* dst, CopyColumn&& copy_column) {
  for (std::int64_t panel = 0; panel < columns.num_panels; ++panel, dst += rows * kPanel<Isa>) {
    for (std::int64_t lane = 0; lane < kPanel<Isa>; ++lane) {
      const std::int64_t c = panel * kPanel<Isa> + lane;
      if (c < columns.count) {
        copy_column(c, temp + lane * rows);
      } else {
        clear_units<Isa>(temp + lane * rows, units);
      }
    }
    for (std::int64_t lane = 0; lane < kPanel<Isa>; lane += Isa::kLanes)
      for (std::int64_t unit = 0; unit < units; unit += Isa::kLanes)
        Isa::transpose(temp + lane * rows + unit, rows, dst + unit * kPanel<Isa> + lane, kPanel<Isa>);
  }
}

/// The reverse for one panel of results: rows[lane][rows] from src[row][lane].
template <class Isa>
[[gnu::noinline]] void unpack_transposed(const typename Isa::Unit* src, std::int64_t width, std::int64_t rows,
                                         typename Isa::Unit* dst) {
  for (std::int64_t lane = 0; lane < kPanel<Isa>; lane += Isa::kLanes)
    for (std::int64_t row = 0; row < width; row += Isa::kLanes)
      Isa::transpose(src + row * kPanel<Isa> + lane, kPanel<Isa>, dst + lane * rows + row, rows);
}

/// dst[i] (+)= factor · src[i], in the tensor's type.
template <class Isa, class T>
inline void write_row_as(T* dst, const typename Isa::Unit* src, std::int64_t width, float factor, bool accumulate) {
  for (std::int64_t i = 0; i < width; i += Isa::kLanes) {
    const std::int64_t n = smaller(width - i, Isa::kLanes);
    auto x = Isa::mul(Isa::load_first(src + i, n), Isa::set(factor));
    if (accumulate) x = Isa::add(x, Isa::load_first(dst + i, n));
    Isa::store_first(dst + i, x, n);
  }
}

template <class Isa>
inline void write_row(const HeadRows& x, std::int64_t row, std::int64_t head, const typename Isa::Unit* src,
                      float factor, bool accumulate) {
  if (x.dtype == DType::f32) {
    write_row_as<Isa>(x.template at<typename Isa::Unit>(row, head), src, x.width, factor, accumulate);
  } else {
    write_row_as<Isa>(x.template at<typename Isa::Half>(row, head), src, x.width, factor, accumulate);
  }
}

}  // namespace isomer::attention_blocks
