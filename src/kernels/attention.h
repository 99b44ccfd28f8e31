// The attention core's one contract (design contract 9). Runs of queries and keys by position serve contiguous shards,
// zigzag, rings, chunked prefill, pages and packed documents alike.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rank_context.h"
#include "core/tensor.h"

namespace isomer {

/// `length` tokens at rows row, row + row_stride, … of a tensor, with consecutive positions from `position` on. Only
/// tokens of equal segment see each other.
struct TokenRun {
  std::int64_t row = 0;
  std::int64_t row_stride = 1;
  std::int64_t length = 0;
  std::int64_t position = 0;
  int segment = 0;
};

/// Query head i uses key/value head ⌊i · num_kv_heads / num_heads⌋. Innermost strides are 1, others are free.
/// logit = scale · (q·k + q_rope·k_rope); a query at position s sees keys at positions ≤ s of its segment.
struct AttentionInputs {
  Tensor q;       // [num_query_rows, num_heads, key_width]
  Tensor k;       // [num_key_rows, num_kv_heads, key_width]
  Tensor v;       // [num_key_rows, num_kv_heads, value_width]; may be a view into k (absorbed MLA)
  Tensor q_rope;  // [num_query_rows, num_heads, rope_width], optional
  Tensor k_rope;  // [num_key_rows, 1, rope_width], shared by the heads; given exactly when q_rope is
  std::vector<TokenRun> query_runs;
  std::vector<TokenRun> key_runs;
  double scale = 1;
  bool causal = true;
};

/// Gradients, overwritten at the rows of the runs, or added to where `accumulate`. Each may be float32 or the inputs'
/// dtype (float32 if accumulated into). dk and dv must not overlap, even where v is a view into k.
struct AttentionGradients {
  Tensor dq;  // as q
  Tensor dk;  // as k
  Tensor dv;  // as v
  Tensor dq_rope;
  Tensor dk_rope;  // summed over heads
  bool accumulate = false;
};

/// Blockwise online softmax (FlashAttention). out [num_query_rows, num_heads, value_width] in the inputs' dtype, lse
/// [num_heads, num_query_rows] float32 (float64 for float64 inputs), natural logarithm; both written at the rows of
/// query_runs. A query that sees no key gets out = 0 and lse = −inf. Float32 statistics and accumulation.
void fused_attention_forward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse);

/// Recomputes the probabilities from lse. `out` and `lse` may be those of a larger key set than in.key_runs, of which
/// this call covers a part (rings): dq, dk and dv are then the part's share.
void fused_attention_backward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                              const Tensor& dout, const AttentionGradients& gradients);

/// Merges partial results over disjoint key sets in float32: into (out, lse) from (other_out, other_lse), for the given
/// rows. −inf is the identity (m = −inf gives out = 0, lse = −inf).
void merge_attention(RankContext& ctx, const Tensor& out, const Tensor& lse, const Tensor& other_out,
                     const Tensor& other_lse);

}  // namespace isomer
