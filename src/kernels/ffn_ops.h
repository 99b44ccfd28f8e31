// What a feed-forward layer does between its products: the gated activation, and the moves of a mixture of experts
// between rows by token and rows sorted by expert. Statistics, weights and sums are float32 (float64 for float64).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// out = SiLU(gate)∘up, all [num_rows, width] with unit inner stride; in place allowed.
void silu_mul(RankContext& ctx, std::string_view name, const Tensor& gate, const Tensor& up, const Tensor& out);
/// dgate = dout∘up∘SiLU'(gate), dup = dout∘SiLU(gate); dgate may be gate, dup may be up.
void silu_mul_backward(RankContext& ctx, std::string_view name, const Tensor& gate, const Tensor& up,
                       const Tensor& dout, const Tensor& dgate, const Tensor& dup);

/// Where the slots of a routing stand when rows are sorted by expert. Slot t·top_k + j is token t's j-th choice. Among
/// the rows of one expert the order is that of the slots.
struct ExpertRows {
  std::int64_t num_tokens = 0, top_k = 0;
  std::vector<std::int32_t> slot_of_row, row_of_slot;  // [num_tokens·top_k]
  std::vector<std::int64_t> begin;                     // [num_experts + 1]

  std::int64_t num_rows() const { return num_tokens * top_k; }
};
/// `experts` [num_tokens, top_k]. Throws std::invalid_argument for an expert outside [0, num_experts), and for one that
/// a token has twice.
ExpertRows sort_by_expert(std::span<const std::int32_t> experts, std::int64_t num_tokens, std::int64_t top_k,
                          std::int64_t num_experts);

/// to[row] = from[token of row], or weights[slot of row] times that. from [num_tokens, width], to [num_rows, width],
/// weights [num_tokens, top_k] or undefined.
void gather_slots(RankContext& ctx, std::string_view name, const Tensor& from, const ExpertRows& rows,
                  const Tensor& weights, const Tensor& to);

/// out[t] = first[t] + second[t] + Σ_j weights[t, j]·from[row of (t, j)], summed in that order in the statistics' type
/// and rounded once. `first`, `second` and `weights` (1) may be undefined; out may be first or second.
struct CombineSlots {
  Tensor from;                // [num_rows, width]
  Tensor weights;             // [num_tokens, top_k]
  Tensor first, second, out;  // [num_tokens, width], from's dtype
};
void combine_slots(RankContext& ctx, std::string_view name, const CombineSlots& args, const ExpertRows& rows);

/// out[t, j] = a[t]·b[row of (t, j)]. a [num_tokens, width], b [num_rows, width], out [num_tokens, top_k].
void slot_dots(RankContext& ctx, std::string_view name, const Tensor& a, const Tensor& b, const ExpertRows& rows,
               const Tensor& out);

}  // namespace isomer
