// The forward pass of one column block: Sᵀ = K·Qᵀ, online softmax, Oᵀ += Vᵀ·Pᵀ, panel by panel.
#pragma once

#include "kernels/cpu/attention_blocks.h"

namespace isomer::attention_blocks {

/// Q, O, K and V of a block pair should stay in 1 MiB of second-level cache, beside what else passes through it. More
/// columns copy the keys less often.
template <class Isa>
BlockSizes forward_block_sizes(const AttentionShape& s) {
  constexpr std::int64_t kCacheBytes = 640 * 1024;
  const std::int64_t key_bytes = (s.key_width + s.rope_width + s.value_width) * 4 / Isa::kPack;
  const std::int64_t column_bytes = (s.key_width + s.rope_width) * 4 / Isa::kPack + s.value_width * 4;
  const std::int64_t keys = key_bytes > 2560 ? kMaxKeys / 2 : kMaxKeys;
  const bool all = kMaxColumns * column_bytes + keys * key_bytes <= kCacheBytes;
  return {all ? kMaxColumns : kMaxColumns / 2, keys};
}

template <class Isa>
struct ForwardBuffers {
  using Unit = typename Isa::Unit;
  ForwardBuffers(const AttentionShape& shape, Scratch& scratch) : width(shape), sizes(forward_block_sizes<Isa>(shape)) {
    const std::int64_t q_rows = round_up(width.key_units, Isa::kLanes);
    q = scratch.take<Unit>(sizes.columns * q_rows);
    out = scratch.take<Unit>(sizes.columns * width.value_rows);
    k = scratch.take<Unit>(sizes.keys * width.key_units);
    v = scratch.take<Unit>(sizes.keys / Isa::kPack * width.value_rows);
    s = scratch.take<Unit>(sizes.keys * kPanel<Isa>);
    p = Isa::kPack == 1 ? s : scratch.take<Unit>(sizes.keys / Isa::kPack * kPanel<Isa>);
    temp = scratch.take<Unit>(kPanel<Isa> * (q_rows > width.value_rows ? q_rows : width.value_rows));
    maximum = scratch.take<Unit>(sizes.columns);
    sum = scratch.take<Unit>(sizes.columns);
  }
  Widths<Isa> width;
  BlockSizes sizes;
  Unit* q;        // [panels][key_units rounded up][kPanel]
  Unit* out;      // [panels][value_rows][kPanel], not yet divided by sum
  Unit* k;        // [keys][key_units]
  Unit* v;        // [keys / kPack][value_rows]
  Unit* s;        // [keys][kPanel] of one panel; then P where kPack is 1
  Unit* p;        // [keys / kPack][kPanel]
  Unit* temp;     // [kPanel][the longer rows]
  Unit* maximum;  // [columns], of logits times log2(e): the reference of P and sum
  Unit* sum;      // [columns]
};

template <class Isa>
[[gnu::noinline]] void pack_queries(const AttentionProblem& p, const ColumnBlock<Isa>& columns,
                                    const Widths<Isa>& width, typename Isa::Unit* temp, typename Isa::Unit* dst) {
  pack_transposed<Isa>(columns, width.key_units, round_up(width.key_units, Isa::kLanes), temp, dst,
                       [&](std::int64_t c, typename Isa::Unit* row) {
                         copy_parts<Isa>(p.q, {columns.head[c], columns.head[c]}, columns.row[c], row);
                       });
}

/// K as units along its width, whole register blocks of rows.
template <class Isa>
[[gnu::noinline]] void pack_keys(const AttentionProblem& p, std::int64_t kv_head, const KeyBlock<Isa>& keys,
                                 const Widths<Isa>& width, typename Isa::Unit* dst) {
  for (std::int64_t key = 0; key < keys.count; ++key)
    copy_parts<Isa>(p.k, {kv_head, 0}, p.keys.row[keys.begin + key], dst + key * width.key_units);
  for (std::int64_t key = keys.count; key < round_up(keys.count, Isa::kRows); ++key)
    clear_units<Isa>(dst + key * width.key_units, width.key_units);
}

/// Rows of x as steps of a reduction over keys: dst[key / kPack][stride].
template <class Isa>
[[gnu::noinline]] void pack_key_steps(const AttentionProblem& p, const HeadRows& x, std::int64_t head,
                                      const KeyBlock<Isa>& keys, std::int64_t stride, typename Isa::Unit* dst) {
  using Storage = typename Isa::Storage;
  for (std::int64_t key = 0; key < keys.count; key += Isa::kPack) {
    const auto row = [&](std::int64_t i) -> const Storage* {
      return i < keys.count ? x.template at<const Storage>(p.keys.row[keys.begin + i], head) : nullptr;
    };
    interleave_rows<Isa>(row(key), row(key + 1), x.width, dst + key / Isa::kPack * stride);
  }
}

/// Sets s to −∞ where a column does not see a key.
template <class Isa, int NV>
[[gnu::noinline]] void mask_panel(const AttentionProblem& p, const ColumnBlock<Isa>& columns, std::int64_t panel,
                                  const KeyBlock<Isa>& keys, typename Isa::Unit* s) {
  const std::int64_t last = smaller(keys.last[panel], keys.count);
  for (std::int64_t key = keys.first[panel]; key < last; ++key) {
    const std::int32_t position = p.keys.position[keys.begin + key];
    const std::int32_t segment = p.keys.segment[keys.begin + key];
    for (int v = 0; v < NV; ++v) {
      auto* at = s + key * kPanel<Isa> + v * Isa::kLanes;
      const std::int64_t c = panel * kPanel<Isa> + v * Isa::kLanes;
      Isa::store(at, Isa::mask_unseen(Isa::load(at), columns.position + c, columns.segment + c, position, segment));
    }
  }
}

/// Follows the running maximum of a panel: where the block's is larger by the threshold, rescales sum and out.
template <class Isa, int NV>
[[gnu::noinline]] void update_maximum(const typename Isa::Unit* s, std::int64_t first, std::int64_t last, float scale,
                                      typename Isa::Unit* maximum, typename Isa::Unit* sum, typename Isa::Unit* out,
                                      std::int64_t rows) {
  using V = typename Isa::V;
  V largest[2][NV];
  for (int v = 0; v < NV; ++v) largest[0][v] = largest[1][v] = Isa::set(-kInfinity);
  std::int64_t key = first;
  for (; key + 2 <= last; key += 2) {
    for (int v = 0; v < NV; ++v) {
      largest[0][v] = Isa::max(largest[0][v], Isa::load(s + key * kPanel<Isa> + v * Isa::kLanes));
      largest[1][v] = Isa::max(largest[1][v], Isa::load(s + (key + 1) * kPanel<Isa> + v * Isa::kLanes));
    }
  }
  for (int v = 0; v < NV; ++v) {
    if (key < last) largest[0][v] = Isa::max(largest[0][v], Isa::load(s + key * kPanel<Isa> + v * Isa::kLanes));
    const V block = Isa::mul(Isa::max(largest[0][v], largest[1][v]), Isa::set(scale));
    const V before = Isa::load(maximum + v * Isa::kLanes);
    const V limit = Isa::add(before, Isa::set(kRescaleThreshold));
    if (!Isa::any_greater(block, limit)) continue;
    const V after = Isa::select_greater(block, limit, block, before);
    // Lanes that stay get exp2(0) = 1 exactly; −∞ − (−∞) would be NaN.
    const V change = Isa::select_greater(after, before, exp2<Isa>(Isa::sub(before, after)), Isa::set(1.0f));
    Isa::store(maximum + v * Isa::kLanes, after);
    Isa::store(sum + v * Isa::kLanes, Isa::mul(Isa::load(sum + v * Isa::kLanes), change));
    for (std::int64_t row = 0; row < rows; ++row) {
      auto* at = out + row * kPanel<Isa> + v * Isa::kLanes;
      Isa::store(at, Isa::mul(Isa::load(at), change));
    }
  }
}

/// P = 2^(scale · S − maximum) into p as steps over keys; adds to sum.
template <class Isa, int NV>
[[gnu::noinline]] void exponentiate(const typename Isa::Unit* s, std::int64_t first, std::int64_t last, float scale,
                                    const typename Isa::Unit* maximum, typename Isa::Unit* sum, typename Isa::Unit* p) {
  using V = typename Isa::V;
  for (int v = 0; v < NV; ++v) {
    const V reference = Isa::load(maximum + v * Isa::kLanes);
    // A column that has seen no key: any finite reference turns its −∞ into 0.
    const V finite = Isa::select_greater(reference, Isa::set(-kInfinity), reference, Isa::zero());
    const auto probability = [&](std::int64_t key) {
      const V logit = Isa::load(s + key * kPanel<Isa> + v * Isa::kLanes);
      return exp2<Isa>(Isa::fms(logit, Isa::set(scale), finite));
    };
    V total[2] = {Isa::zero(), Isa::zero()};
    std::int64_t key = first;
    for (; key + 2 <= last; key += 2) {
      const V even = probability(key);
      const V odd = probability(key + 1);
      total[0] = Isa::add(total[0], even);
      total[1] = Isa::add(total[1], odd);
      Isa::store_steps(p, key, v, even, odd);
    }
    if (key < last) {
      const V even = probability(key);
      total[0] = Isa::add(total[0], even);
      Isa::store_steps(p, key, v, even, Isa::zero());
    }
    auto* at = sum + v * Isa::kLanes;
    Isa::store(at, Isa::add(Isa::load(at), Isa::add(total[0], total[1])));
  }
}

template <class Isa, int NV>
inline void forward_panel(const AttentionProblem& problem, const ForwardBuffers<Isa>& b,
                          const ColumnBlock<Isa>& columns, std::int64_t panel, const KeyBlock<Isa>& keys,
                          Prefetch<Isa>& prefetch) {
  const std::int64_t first = keys.first[panel];
  const std::int64_t last = keys.last[panel];
  const std::int64_t seen = smaller(last, keys.count);
  if (first >= last) return;
  const float scale = static_cast<float>(problem.scale) * kLog2E;
  const std::int64_t q_rows = round_up(b.width.key_units, Isa::kLanes);
  auto* out = b.out + panel * b.width.value_rows * kPanel<Isa>;
  auto* maximum = b.maximum + panel * kPanel<Isa>;
  auto* sum = b.sum + panel * kPanel<Isa>;
  multiply_rows<Isa, NV>(b.k, b.width.key_units, b.q + panel * q_rows * kPanel<Isa>, b.width.key_units, b.s, first,
                         last, prefetch);
  if (keys.masked) mask_panel<Isa, NV>(problem, columns, panel, keys, b.s);
  update_maximum<Isa, NV>(b.s, first, seen, scale, maximum, sum, out, b.width.value);
  exponentiate<Isa, NV>(b.s, first, seen, scale, maximum, sum, b.p);
  const std::int64_t step = first / Isa::kPack;
  add_transposed_product<Isa, NV>(b.v + step * b.width.value_rows, b.width.value_rows, b.p + step * kPanel<Isa>,
                                  round_up(seen, Isa::kPack) / Isa::kPack - step, out,
                                  round_up(b.width.value, Isa::kRows), prefetch);
}

/// Divides by the sums and writes out and lse, to the tensors or to the task's partial results.
template <class Isa>
[[gnu::noinline]] void finish_forward(const AttentionProblem& p, const ForwardTask& task,
                                      const ColumnBlock<Isa>& columns, const ForwardBuffers<Isa>& b) {
  for (std::int64_t panel = 0; panel < columns.num_panels; ++panel) {
    unpack_transposed<Isa>(b.out + panel * b.width.value_rows * kPanel<Isa>, b.width.value, b.width.value_rows, b.temp);
    const std::int64_t begin = panel * kPanel<Isa>;
    for (std::int64_t c = begin; c < smaller(columns.count, begin + kPanel<Isa>); ++c) {
      const float total = b.sum[c];
      const bool empty = b.maximum[c] == -kInfinity && total == 0;
      const float lse = empty ? -kInfinity : b.maximum[c] * kLn2 + __builtin_logf(total);
      const float factor = empty ? 0 : 1 / total;
      const auto* src = b.temp + (c - begin) * b.width.value_rows;
      if (task.partial_out != nullptr) {
        write_row_as<Isa>(static_cast<typename Isa::Unit*>(task.partial_out) + c * b.width.value, src, b.width.value,
                          factor, false);
        static_cast<float*>(task.partial_lse)[c] = lse;
      } else {
        write_row<Isa>(p.out, columns.row[c], columns.head[c], src, factor, false);
        static_cast<float*>(p.lse)[columns.head[c] * p.lse_head_stride + columns.row[c]] = lse;
      }
    }
  }
}

template <class Isa>
void forward_block(const AttentionProblem& problem, const ForwardTask& task, char* memory) {
  Scratch scratch(memory);
  const ForwardBuffers<Isa> b(problem.shape, scratch);
  ColumnBlock<Isa> columns;
  columns.fill(problem, task.kv_head, task.column_begin, task.num_columns);
  pack_queries<Isa>(problem, columns, b.width, b.temp, b.q);
  clear_units<Isa>(b.out, columns.num_panels * b.width.value_rows * kPanel<Isa>);
  for (std::int64_t c = 0; c < columns.num_panels * kPanel<Isa>; ++c) {
    b.maximum[c] = -kInfinity;
    b.sum[c] = 0;
  }
  KeyBlock<Isa> blocks[2];
  bool more = blocks[0].find_next(problem, columns, task.key_begin, task.key_end, b.sizes.keys);
  for (int i = 0; more; i ^= 1) {
    const KeyBlock<Isa>& keys = blocks[i];
    KeyBlock<Isa>& next = blocks[i ^ 1];
    more = next.find_next(problem, columns, keys.begin + b.sizes.keys, task.key_end, b.sizes.keys);
    Prefetch<Isa> prefetch;
    if (more) {
      prefetch = {&problem, task.kv_head, next.begin, next.begin, next.begin + next.count};
      prefetch.spread_over(columns.num_panels * (round_up(keys.count, Isa::kRows) / Isa::kRows),
                           columns.num_panels * (round_up(b.width.value, Isa::kRows) / Isa::kRows));
    }
    pack_keys<Isa>(problem, task.kv_head, keys, b.width, b.k);
    pack_key_steps<Isa>(problem, problem.v, task.kv_head, keys, b.width.value_rows, b.v);
    for (std::int64_t panel = 0; panel < columns.num_panels; ++panel) {
      const bool narrow = columns.count - panel * kPanel<Isa> <= Isa::kLanes;
      if (narrow) {
        forward_panel<Isa, 1>(problem, b, columns, panel, keys, prefetch);
      } else {
        forward_panel<Isa, Isa::kVectors>(problem, b, columns, panel, keys, prefetch);
      }
    }
  }
  finish_forward<Isa>(problem, task, columns, b);
}

template <class Isa>
std::int64_t forward_block_columns(const AttentionShape& shape) {
  return forward_block_sizes<Isa>(shape).columns;
}

template <class Isa>
std::int64_t forward_scratch_bytes(const AttentionShape& shape) {
  Scratch scratch(nullptr);
  const ForwardBuffers<Isa> buffers(shape, scratch);
  return scratch.bytes();
}

}  // namespace isomer::attention_blocks
