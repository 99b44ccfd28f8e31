// The backward pass of one column block. Per key block and panel: Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, P from lse,
// dS = P ∘ (dP − δ) · scale, dQᵀ += Kᵀ·dSᵀ; then for the whole block dV += Pᵀ·dO and dK += dSᵀ·Q, added to float32
// sums outside. Five products; the first recomputes what the forward pass had.
#pragma once

#include "kernels/cpu/attention_blocks_forward.h"

namespace isomer::attention_blocks {

template <class Isa>
BlockSizes backward_block_sizes(const AttentionShape& s) {
  const std::int64_t row_bytes = (s.key_width + s.rope_width + s.value_width) * 4 / Isa::kPack;
  const std::int64_t size = row_bytes > 1536 ? kMaxKeys / 2 : kMaxKeys;
  return {size, size};
}

template <class Isa>
struct BackwardBuffers {
  using Unit = typename Isa::Unit;
  BackwardBuffers(const AttentionShape& shape, Scratch& scratch)
      : width(shape), sizes(backward_block_sizes<Isa>(shape)) {
    const std::int64_t steps = sizes.columns / Isa::kPack;
    q_rows = round_up(width.key_units, Isa::kLanes);
    dout_rows = round_up(width.value_units, Isa::kLanes);
    q = scratch.take<Unit>(sizes.columns * q_rows);
    dout = scratch.take<Unit>(sizes.columns * dout_rows);
    for (int part = 0; part < 2; ++part)
      q_steps[part] = scratch.take<Unit>(steps * round_up(width.part[part], kPanel<Isa>));
    dout_steps = scratch.take<Unit>(steps * round_up(width.value, kPanel<Isa>));
    dq = scratch.take<Unit>(sizes.columns * width.key_rows);
    k = scratch.take<Unit>(sizes.keys * width.key_units + Isa::kLanes);
    k_stride = Isa::kPack == 1 ? width.key_units : width.key_rows + Isa::kLanes;
    k_steps = Isa::kPack == 1 ? k : scratch.take<Unit>(sizes.keys / Isa::kPack * k_stride);
    v = scratch.take<Unit>(sizes.keys * width.value_units);
    s = scratch.take<Unit>(sizes.keys * kPanel<Isa>);
    dp = scratch.take<Unit>(sizes.keys * kPanel<Isa>);
    ds_steps = Isa::kPack == 1 ? s : scratch.take<Unit>(sizes.keys / Isa::kPack * kPanel<Isa>);
    p_rows = scratch.take<Unit>(sizes.keys * steps);
    ds_rows = scratch.take<Unit>(sizes.keys * steps);
    temp = scratch.take<Unit>(kPanel<Isa> * (width.key_rows > width.value_rows ? width.key_rows : width.value_rows));
    lse = scratch.take<Unit>(sizes.columns);
    delta = scratch.take<Unit>(sizes.columns);
  }
  Widths<Isa> width;
  BlockSizes sizes;
  std::int64_t q_rows, dout_rows, k_stride;
  Unit* q;           // [panels][q_rows][kPanel]
  Unit* dout;        // [panels][dout_rows][kPanel]
  Unit* q_steps[2];  // per part: [element panels][columns / kPack][kPanel]
  Unit* dout_steps;  // likewise
  Unit* dq;          // [panels][key_rows][kPanel]
  Unit* k;           // [keys][key_units]
  Unit* k_steps;     // [keys / kPack][k_stride]
  Unit* v;           // [keys][value_units]
  Unit* s;           // [keys][kPanel] of one panel
  Unit* dp;          // [keys][kPanel] of one panel
  Unit* ds_steps;    // [keys / kPack][kPanel] of one panel
  Unit* p_rows;      // [keys][columns / kPack]
  Unit* ds_rows;     // [keys][columns / kPack]
  Unit* temp;        // [kPanel][the longer rows]
  Unit* lse;         // [columns], times log2(e); +∞ where nothing is seen, so that P = 0
  Unit* delta;       // [columns], dO·O times scale
};

/// Columns as steps of a reduction over columns: dst[element panel][column / kPack][kPanel].
template <class Isa>
[[gnu::noinline]] void pack_column_steps(const HeadRows& x, const ColumnBlock<Isa>& columns, std::int64_t block_columns,
                                         typename Isa::Unit* dst) {
  using Storage = typename Isa::Storage;
  const auto row = [&](std::int64_t c, std::int64_t i) -> const Storage* {
    return c < columns.count ? x.template at<const Storage>(columns.row[c], columns.head[c]) + i : nullptr;
  };
  const std::int64_t steps = block_columns / Isa::kPack;
  for (std::int64_t c = 0; c < columns.num_panels * kPanel<Isa>; c += Isa::kPack) {
    for (std::int64_t i = 0; i < x.width; i += kPanel<Isa>) {
      auto* at = dst + i * steps + c / Isa::kPack * kPanel<Isa>;
      interleave_rows<Isa>(row(c, i), row(c + Isa::kPack - 1, i), smaller(x.width - i, kPanel<Isa>), at);
    }
  }
}

template <class Isa>
[[gnu::noinline]] void pack_statistics(const AttentionProblem& p, const ColumnBlock<Isa>& columns,
                                       const BackwardBuffers<Isa>& b) {
  using Storage = typename Isa::Storage;
  for (std::int64_t c = 0; c < columns.num_panels * kPanel<Isa>; ++c) {
    b.lse[c] = kInfinity;
    b.delta[c] = 0;
    if (c >= columns.count) continue;
    const Storage* out = p.out.template at<const Storage>(columns.row[c], columns.head[c]);
    const Storage* dout = p.dout.template at<const Storage>(columns.row[c], columns.head[c]);
    auto total = Isa::zero();
    for (std::int64_t i = 0; i < p.out.width; i += Isa::kLanes) {
      const std::int64_t n = smaller(p.out.width - i, Isa::kLanes);
      total = Isa::fma(Isa::load_first(out + i, n), Isa::load_first(dout + i, n), total);
    }
    const float lse = static_cast<const float*>(p.lse)[columns.head[c] * p.lse_head_stride + columns.row[c]];
    if (lse != -kInfinity) b.lse[c] = lse * kLog2E;
    b.delta[c] = Isa::sum(total) * static_cast<float>(p.scale);
  }
}

template <class Isa>
inline void pack_columns(const AttentionProblem& p, const ColumnBlock<Isa>& columns, const BackwardBuffers<Isa>& b) {
  using Storage = typename Isa::Storage;
  pack_queries<Isa>(p, columns, b.width, b.temp, b.q);
  pack_transposed<Isa>(
      columns, b.width.value_units, b.dout_rows, b.temp, b.dout, [&](std::int64_t c, typename Isa::Unit* row) {
        copy_row<Isa>(p.dout.template at<const Storage>(columns.row[c], columns.head[c]), p.dout.width, row);
      });
  for (int part = 0; part < 2; ++part) pack_column_steps<Isa>(p.q[part], columns, b.sizes.columns, b.q_steps[part]);
  pack_column_steps<Isa>(p.dout, columns, b.sizes.columns, b.dout_steps);
  pack_statistics<Isa>(p, columns, b);
  clear_units<Isa>(b.dq, columns.num_panels * b.width.key_rows * kPanel<Isa>);
}

template <class Isa>
[[gnu::noinline]] void pack_block_keys(const AttentionProblem& p, std::int64_t kv_head, const KeyBlock<Isa>& keys,
                                       const BackwardBuffers<Isa>& b) {
  using Storage = typename Isa::Storage;
  pack_keys<Isa>(p, kv_head, keys, b.width, b.k);
  if constexpr (Isa::kPack > 1) {
    pack_key_steps<Isa>(p, p.k[0], kv_head, keys, b.k_stride, b.k_steps);
    pack_key_steps<Isa>(p, p.k[1], 0, keys, b.k_stride, b.k_steps + p.k[0].width);
  }
  for (std::int64_t key = 0; key < keys.count; ++key)
    copy_row<Isa>(p.v.template at<const Storage>(p.keys.row[keys.begin + key], kv_head), p.v.width,
                  b.v + key * b.width.value_units);
  for (std::int64_t key = keys.count; key < round_up(keys.count, Isa::kRows); ++key)
    clear_units<Isa>(b.v + key * b.width.value_units, b.width.value_units);
}

/// P and dS of one panel from S and dP, as rows and (dS) as steps over keys. Rows that are not computed become zero.
template <class Isa>
[[gnu::noinline]] void differentiate_softmax(const AttentionProblem& p, const BackwardBuffers<Isa>& b,
                                             std::int64_t panel, const KeyBlock<Isa>& keys) {
  using V = typename Isa::V;
  const std::int64_t stride = b.sizes.columns / Isa::kPack;
  const std::int64_t last = smaller(keys.last[panel], keys.count);
  const V scale = Isa::set(static_cast<float>(p.scale));
  const V scale2 = Isa::set(static_cast<float>(p.scale) * kLog2E);
  for (int v = 0; v < Isa::kVectors; ++v) {
    const std::int64_t column = panel * kPanel<Isa> + v * Isa::kLanes;
    const V lse = Isa::load(b.lse + column);
    const V delta = Isa::load(b.delta + column);
    const auto row = [&](std::int64_t key) {
      const std::int64_t at = key * kPanel<Isa> + v * Isa::kLanes;
      const V probability = exp2<Isa>(Isa::fms(Isa::load(b.s + at), scale2, lse));
      const V ds = Isa::mul(probability, Isa::fms(Isa::load(b.dp + at), scale, delta));
      Isa::store_cells(b.p_rows + key * stride, column, probability);
      Isa::store_cells(b.ds_rows + key * stride, column, ds);
      return ds;
    };
    std::int64_t key = keys.first[panel];
    for (; key + 2 <= last; key += 2) {
      const V even = row(key);
      const V odd = row(key + 1);
      Isa::store_steps(b.ds_steps, key, v, even, odd);
    }
    if (key < last) Isa::store_steps(b.ds_steps, key, v, row(key), Isa::zero());
    const auto clear = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        Isa::store_cells(b.p_rows + i * stride, column, Isa::zero());
        Isa::store_cells(b.ds_rows + i * stride, column, Isa::zero());
      }
    };
    clear(0, keys.first[panel]);
    clear(last, round_up(keys.count, Isa::kRows));
  }
}

template <class Isa>
inline void backward_panel(const AttentionProblem& p, const BackwardBuffers<Isa>& b, const ColumnBlock<Isa>& columns,
                           std::int64_t panel, const KeyBlock<Isa>& keys, Prefetch<Isa>& prefetch) {
  constexpr int kVectors = Isa::kVectors;
  const std::int64_t first = keys.first[panel];
  const std::int64_t last = keys.last[panel];
  if (first < last) {
    multiply_rows<Isa, kVectors>(b.k, b.width.key_units, b.q + panel * b.q_rows * kPanel<Isa>, b.width.key_units, b.s,
                                 first, last, prefetch);
    multiply_rows<Isa, kVectors>(b.v, b.width.value_units, b.dout + panel * b.dout_rows * kPanel<Isa>,
                                 b.width.value_units, b.dp, first, last, prefetch);
    if (keys.masked) mask_panel<Isa, kVectors>(p, columns, panel, keys, b.s);
  }
  differentiate_softmax<Isa>(p, b, panel, keys);
  if (first >= last) return;
  const std::int64_t step = first / Isa::kPack;
  const std::int64_t end = round_up(smaller(last, keys.count), Isa::kPack) / Isa::kPack;
  add_transposed_product<Isa, kVectors>(b.k_steps + step * b.k_stride, b.k_stride, b.ds_steps + step * kPanel<Isa>,
                                        end - step, b.dq + panel * b.width.key_rows * kPanel<Isa>,
                                        round_up(b.width.key, Isa::kRows), prefetch);
}

/// rows[i] + [0, n) += Σ_s a(i, s) · x(s) for one register block; a null row is left out.
template <class Isa, int NV>
[[gnu::noinline]] void add_to_rows(const typename Isa::Unit* a, std::int64_t a_stride, const typename Isa::Unit* x,
                                   std::int64_t steps, typename Isa::Unit* const* rows, std::int64_t offset,
                                   std::int64_t n) {
  for (int i = 0; i < Isa::kRows; ++i) {
    if (rows[i] == nullptr) continue;
    for (int v = 0; v < NV; ++v) __builtin_prefetch(rows[i] + offset + v * Isa::kLanes, 1);
  }
  typename Isa::V acc[Isa::kRows][NV];
  clear<Isa, NV>(acc);
  multiply<Isa, NV, ARows::strided>(acc, a, a_stride, x, steps);
#pragma GCC unroll 8
  for (int i = 0; i < Isa::kRows; ++i) {
    if (rows[i] == nullptr) continue;
    auto* at = rows[i] + offset;
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v, at += Isa::kLanes) {
      const std::int64_t lanes = n - v * Isa::kLanes;
      if (lanes >= Isa::kLanes) {
        Isa::store(at, Isa::add(Isa::load(at), acc[i][v]));
      } else {
        Isa::store_first(at, Isa::add(Isa::load_first(at, lanes), acc[i][v]), lanes);
      }
    }
  }
}

/// sums[key] += Σ_column cells[key][column] · x[column], for the block's keys.
template <class Isa>
inline void add_to_keys(const AttentionProblem& p, const GradientRows& sums, std::int64_t width,
                        const KeyBlock<Isa>& keys, std::int64_t num_panels, std::int64_t block_columns,
                        const typename Isa::Unit* cells, const typename Isa::Unit* x) {
  using Unit = typename Isa::Unit;
  const std::int64_t stride = block_columns / Isa::kPack;
  constexpr std::int64_t kPanelSteps = kPanel<Isa> / Isa::kPack;
  Unit* rows[kMaxKeys];
  for (std::int64_t key = 0; key < round_up(keys.count, Isa::kRows); ++key) {
    const std::int64_t token = keys.begin + key;
    const bool real = key < keys.count;
    rows[key] =
        !real ? nullptr : static_cast<Unit*>(sums.data) + (sums.by_row ? p.keys.row[token] : token) * sums.stride;
  }
  for (std::int64_t i = 0; i < width; i += kPanel<Isa>, x += stride * kPanel<Isa>) {
    for (std::int64_t key = 0; key < keys.count; key += Isa::kRows) {
      std::int64_t low = num_panels;
      std::int64_t high = 0;
      for (std::int64_t panel = 0; panel < num_panels; ++panel) {
        if (key < keys.first[panel] || key >= keys.last[panel]) continue;
        low = smaller(low, panel);
        high = panel + 1;
      }
      if (high == 0) continue;
      const Unit* a = cells + key * stride + low * kPanelSteps;
      const Unit* b = x + low * kPanelSteps * kPanel<Isa>;
      const std::int64_t steps = (high - low) * kPanelSteps;
      if (width - i <= Isa::kLanes) {
        add_to_rows<Isa, 1>(a, stride, b, steps, rows + key, i, width - i);
      } else {
        add_to_rows<Isa, Isa::kVectors>(a, stride, b, steps, rows + key, i, width - i);
      }
    }
  }
}

template <class Isa>
[[gnu::noinline]] void finish_backward(const AttentionProblem& p, const ColumnBlock<Isa>& columns,
                                       const BackwardBuffers<Isa>& b) {
  for (std::int64_t panel = 0; panel < columns.num_panels; ++panel) {
    unpack_transposed<Isa>(b.dq + panel * b.width.key_rows * kPanel<Isa>, b.width.key, b.width.key_rows, b.temp);
    const std::int64_t begin = panel * kPanel<Isa>;
    for (std::int64_t c = begin; c < smaller(columns.count, begin + kPanel<Isa>); ++c) {
      const auto* src = b.temp + (c - begin) * b.width.key_rows;
      write_row<Isa>(p.dq[0], columns.row[c], columns.head[c], src, 1, p.accumulate);
      if (p.dq[1].width > 0)
        write_row<Isa>(p.dq[1], columns.row[c], columns.head[c], src + p.dq[0].width, 1, p.accumulate);
    }
  }
}

template <class Isa>
void backward_block(const AttentionProblem& p, const BackwardTask& task, char* memory) {
  Scratch scratch(memory);
  const BackwardBuffers<Isa> b(p.shape, scratch);
  ColumnBlock<Isa> columns;
  columns.fill(p, task.kv_head, task.column_begin, task.num_columns);
  pack_columns<Isa>(p, columns, b);
  KeyBlock<Isa> blocks[2];
  bool more = blocks[0].find_next(p, columns, 0, p.keys.size, b.sizes.keys);
  for (int i = 0; more; i ^= 1) {
    const KeyBlock<Isa>& keys = blocks[i];
    KeyBlock<Isa>& next = blocks[i ^ 1];
    more = next.find_next(p, columns, keys.begin + b.sizes.keys, p.keys.size, b.sizes.keys);
    Prefetch<Isa> prefetch;
    if (more) prefetch = {&p, task.kv_head, next.begin, next.begin, next.begin + next.count};
    pack_block_keys<Isa>(p, task.kv_head, keys, b);
    for (std::int64_t panel = 0; panel < columns.num_panels; ++panel)
      backward_panel<Isa>(p, b, columns, panel, keys, prefetch);
    add_to_keys<Isa>(p, task.dv, b.width.value, keys, columns.num_panels, b.sizes.columns, b.p_rows, b.dout_steps);
    for (int part = 0; part < 2; ++part)
      add_to_keys<Isa>(p, task.dk[part], b.width.part[part], keys, columns.num_panels, b.sizes.columns, b.ds_rows,
                       b.q_steps[part]);
  }
  finish_backward<Isa>(p, columns, b);
}

template <class Isa>
std::int64_t backward_block_columns(const AttentionShape& shape) {
  return backward_block_sizes<Isa>(shape).columns;
}

template <class Isa>
std::int64_t backward_scratch_bytes(const AttentionShape& shape) {
  Scratch scratch(nullptr);
  const BackwardBuffers<Isa> buffers(shape, scratch);
  return scratch.bytes();
}

template <class Isa>
constexpr AttentionBlockKernels kernels_of() {
  return {forward_block_columns<Isa>,  backward_block_columns<Isa>, forward_scratch_bytes<Isa>,
          backward_scratch_bytes<Isa>, forward_block<Isa>,          backward_block<Isa>};
}

}  // namespace isomer::attention_blocks
