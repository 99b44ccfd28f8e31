// Cases and data for the attention tests: every row that no run names is NaN, and so is the padding of each row.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/attention_registry.h"
#include "kernels/reference/attention.h"

namespace isomer::testing {

struct AttentionCase {
  std::string name;
  std::int64_t num_heads = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t key_width = 20;
  std::int64_t rope_width = 0;
  std::int64_t value_width = 20;
  std::vector<TokenRun> query_runs;
  std::vector<TokenRun> key_runs;
  bool causal = true;
  bool value_in_key = false;  // v is a view of k's first columns
  bool accumulate = false;
  bool f32_gradients = false;
};

inline void PrintTo(const AttentionCase& c, std::ostream* stream) { *stream << c.name; }

inline std::int64_t rows_of(const std::vector<TokenRun>& runs) {
  std::int64_t rows = 3;  // never touched
  for (const auto& run : runs) rows = std::max(rows, run.row + run.length * run.row_stride + 1);
  return rows;
}

/// A number in [−√3, √3) of variance 1 that depends on (seed, index) alone.
inline double noise(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + index * 0xbf58476d1ce4e5b9u + 1;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
  return (static_cast<double>(x >> 11) * 0x1p-53 - 0.5) * 2 * std::sqrt(3.0);
}

inline double get(const Tensor& x, std::int64_t offset) {
  return visit_dtype(x.dtype(), [&]<class T>() { return static_cast<double>(x.data<T>()[offset]); });
}
inline void set(const Tensor& x, std::int64_t offset, double value) {
  visit_dtype(x.dtype(), [&]<class T>() { x.data<T>()[offset] = static_cast<T>(value); });
}

/// [rows, heads, width] of NaN, as a view whose rows have one column of padding (unless packed).
inline Tensor padded(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t width, bool packed = false) {
  const Tensor whole = Tensor::unrecorded("test", dtype, {rows, heads, width + (packed ? 0 : 1)});
  for (std::int64_t i = 0; i < whole.numel(); ++i) set(whole, i, std::nan(""));
  return whole.slice(2, 0, width);
}

/// Calls fn(offset) for each element of the rows of the runs.
template <class Fn>
void for_each_element(const Tensor& x, const std::vector<TokenRun>& runs, Fn&& fn) {
  for (const auto& run : runs)
    for (std::int64_t t = 0; t < run.length; ++t)
      for (std::int64_t head = 0; head < x.size(1); ++head)
        for (std::int64_t i = 0; i < x.size(2); ++i)
          fn((run.row + t * run.row_stride) * x.stride(0) + head * x.stride(1) + i);
}

inline void fill(const Tensor& x, const std::vector<TokenRun>& runs, std::uint64_t seed) {
  if (x.defined()) for_each_element(x, runs, [&](std::int64_t at) { set(x, at, noise(seed, at)); });
}

/// σ ≈ 3 of the logits, so that softmax is far from flat.
inline AttentionInputs make_inputs(const AttentionCase& c, DType dtype) {
  AttentionInputs in{.query_runs = c.query_runs, .key_runs = c.key_runs, .causal = c.causal};
  const std::int64_t q_rows = rows_of(c.query_runs);
  const std::int64_t k_rows = rows_of(c.key_runs);
  in.q = padded(dtype, q_rows, c.num_heads, c.key_width);
  in.k = padded(dtype, k_rows, c.num_kv_heads, c.key_width);
  in.v = c.value_in_key ? in.k.slice(2, 0, c.value_width) : padded(dtype, k_rows, c.num_kv_heads, c.value_width);
  if (c.rope_width > 0) {
    in.q_rope = padded(dtype, q_rows, c.num_heads, c.rope_width);
    in.k_rope = padded(dtype, k_rows, 1, c.rope_width);
  }
  fill(in.q, c.query_runs, 1);
  if (!c.value_in_key) fill(in.v, c.key_runs, 3);
  fill(in.k, c.key_runs, 2);
  fill(in.q_rope, c.query_runs, 4);
  fill(in.k_rope, c.key_runs, 5);
  in.scale = 3 / std::sqrt(static_cast<double>(c.key_width + c.rope_width));
  return in;
}

inline AttentionGradients make_gradients(const AttentionCase& c, DType dtype) {
  const std::int64_t q_rows = rows_of(c.query_runs);
  const std::int64_t k_rows = rows_of(c.key_runs);
  AttentionGradients g{.accumulate = c.accumulate};
  g.dq = padded(dtype, q_rows, c.num_heads, c.key_width);
  g.dk = padded(dtype, k_rows, c.num_kv_heads, c.key_width);
  g.dv = padded(dtype, k_rows, c.num_kv_heads, c.value_width);
  if (c.rope_width > 0) {
    g.dq_rope = padded(dtype, q_rows, c.num_heads, c.rope_width);
    g.dk_rope = padded(dtype, k_rows, 1, c.rope_width);
  }
  if (!c.accumulate) return g;
  fill(g.dq, c.query_runs, 11);
  fill(g.dk, c.key_runs, 12);
  fill(g.dv, c.key_runs, 13);
  fill(g.dq_rope, c.query_runs, 14);
  fill(g.dk_rope, c.key_runs, 15);
  return g;
}

inline TokenRun run(std::int64_t row, std::int64_t length, std::int64_t position, int segment = 0,
                    std::int64_t row_stride = 1) {
  return {.row = row, .row_stride = row_stride, .length = length, .position = position, .segment = segment};
}

/// Tokens 0, 2, 4, … then 1, 3, …: runs of one token each.
inline std::vector<TokenRun> single_tokens(std::int64_t count) {
  std::vector<TokenRun> runs;
  for (std::int64_t i = 0; i < count; ++i)
    runs.push_back(run(i, 1, (2 * i) % count + (2 * i >= count && count % 2 == 0)));
  return runs;
}

inline std::vector<AttentionCase> attention_cases() {
  const auto self = [](std::string name, std::int64_t tokens, std::int64_t h, std::int64_t g, std::int64_t n,
                       std::int64_t r, std::int64_t m) {
    return AttentionCase{.name = std::move(name),
                         .num_heads = h,
                         .num_kv_heads = g,
                         .key_width = n,
                         .rope_width = r,
                         .value_width = m,
                         .query_runs = {run(1, tokens, 0)},
                         .key_runs = {run(1, tokens, 0)}};
  };
  std::vector<AttentionCase> cases = {
      self("one_token", 1, 2, 2, 20, 0, 20),
      self("width_one", 3, 1, 1, 1, 0, 1),
      self("odd", 37, 3, 3, 19, 0, 21),
      self("mla", 150, 2, 2, 128, 64, 128),
      self("joined_192", 131, 2, 2, 192, 0, 128),
      self("rope_40_8", 133, 4, 2, 40, 8, 40),
      self("rope_many_heads", 9, 20, 20, 6, 3, 5),
      self("value_wider", 40, 2, 1, 16, 0, 48),
      self("eighty_64", 65, 2, 2, 80, 0, 64),
      self("absorbed", 35, 16, 1, 576, 0, 512),
      self("absorbed_rope", 21, 6, 1, 64, 16, 64),
  };
  cases.back().value_in_key = cases[cases.size() - 2].value_in_key = true;
  cases[3].f32_gradients = true;
  cases[5].f32_gradients = cases[5].accumulate = true;
  cases[7].f32_gradients = cases[7].accumulate = true;
  const auto add = [&](AttentionCase c) { cases.push_back(std::move(c)); };
  add({.name = "cross_segments",
       .num_heads = 2,
       .num_kv_heads = 2,
       .query_runs = {run(0, 3, 7), run(5, 2, 0, 4)},
       .key_runs = {run(2, 200, 0), run(210, 61, 0, 4)},
       .causal = false});
  add({.name = "zigzag_batch",
       .num_heads = 2,
       .num_kv_heads = 1,
       .rope_width = 4,
       .value_width = 12,
       .query_runs = {run(1, 33, 0, 0, 2), run(67, 31, 97, 0, 2)},
       .key_runs = {run(0, 64, 33, 0, 3), run(193, 40, 0, 0, 1)}});
  add({.name = "documents",
       .num_heads = 2,
       .num_kv_heads = 2,
       .value_width = 33,
       .query_runs = {run(0, 3, 0, 1), run(3, 1, 0, 2), run(4, 150, 0, 3), run(160, 0, 0, 4), run(154, 17, 0, 5)},
       .key_runs = {run(0, 3, 0, 1), run(3, 1, 0, 2), run(4, 150, 0, 3), run(160, 0, 0, 4), run(154, 17, 0, 5)},
       .f32_gradients = true});
  std::vector<TokenRun> alternating;  // panels between two that see a key and don't see it themselves
  for (int i = 0; i < 8; ++i) alternating.push_back(run(32 * i, 32, 32 * i, i % 2));
  add({.name = "alternating", .query_runs = alternating, .key_runs = alternating, .causal = false});
  add({.name = "later_chunk",
       .num_heads = 3,
       .num_kv_heads = 3,
       .query_runs = {run(0, 45, 100)},
       .key_runs = {run(0, 145, 0)}});
  add({.name = "round_robin", .query_runs = single_tokens(70), .key_runs = single_tokens(70)});
  add({.name = "no_queries", .num_heads = 2, .num_kv_heads = 2, .rope_width = 4, .key_runs = {run(0, 5, 0)}});
  add({.name = "no_keys", .num_heads = 2, .num_kv_heads = 2, .rope_width = 4, .query_runs = {run(0, 5, 0)}});
  add({.name = "some_see_nothing",
       .num_heads = 2,
       .num_kv_heads = 2,
       .query_runs = {run(0, 20, 0), run(20, 3, 0, 9)},
       .key_runs = {run(0, 20, 10), run(30, 3, 0, 8)}});
  add({.name = "no_heads",
       .num_heads = 0,
       .num_kv_heads = 0,
       .query_runs = {run(0, 5, 0)},
       .key_runs = {run(0, 5, 0)}});
  add({.name = "decode",
       .num_heads = 2,
       .num_kv_heads = 1,
       .key_width = 8,
       .value_width = 8,
       .query_runs = {run(0, 1, 2600)},
       .key_runs = {run(0, 2601, 0)}});
  add({.name = "decode_absorbed",
       .num_heads = 16,
       .num_kv_heads = 1,
       .key_width = 24,
       .value_width = 16,
       .query_runs = {run(0, 3, 198)},
       .key_runs = {run(0, 64, 0), run(100, 64, 64), run(200, 73, 128)},
       .value_in_key = true,
       .f32_gradients = true});
  add({.name = "decode_split_segments",
       .num_heads = 1,
       .num_kv_heads = 1,
       .key_width = 4,
       .value_width = 3,
       .query_runs = {run(0, 2, 2047), run(2, 2, 0, 1), run(4, 1, 0, 2)},
       .key_runs = {run(0, 2049, 0), run(2049, 1050, 0, 1)}});
  // One to four columns of whole vectors: grouped queries in decode.
  add({.name = "few_one",
       .num_heads = 2,
       .num_kv_heads = 2,
       .key_width = 32,
       .value_width = 32,
       .query_runs = {run(1, 1, 0)},
       .key_runs = {run(2, 1, 0)}});
  add({.name = "few_grouped",
       .num_heads = 6,
       .num_kv_heads = 2,
       .key_width = 64,
       .value_width = 96,
       .query_runs = {run(1, 1, 276)},
       .key_runs = {run(70, 64, 64), run(3, 64, 0), run(140, 64, 128, 0, 2), run(300, 101, 192)}});
  add({.name = "few_queries_of_segments",
       .num_heads = 2,
       .num_kv_heads = 1,
       .key_width = 128,
       .value_width = 64,
       .query_runs = {run(0, 1, 130), run(2, 1, 5, 3)},
       .key_runs = {run(0, 133, 0), run(140, 40, 0, 3), run(190, 200, 0, 7)}});
  add({.name = "few_split",
       .num_heads = 1,
       .num_kv_heads = 1,
       .key_width = 64,
       .value_width = 64,
       .query_runs = {run(0, 4, 2999)},
       .key_runs = {run(0, 3003, 0)}});
  add({.name = "few_that_see_nothing",
       .num_heads = 3,
       .num_kv_heads = 1,
       .key_width = 32,
       .value_width = 64,
       .query_runs = {run(0, 1, 5)},
       .key_runs = {run(0, 200, 6)}});
  return cases;
}

}  // namespace isomer::testing
