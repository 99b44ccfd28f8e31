// The stages of an attention block in decode, which layouts compose. T rows of a step, h' the rank's query heads, w_k
// and w_v the widths of a cached key and value (latent attention: d + r and d; grouped-query: head_dim).
#pragma once

#include <functional>

#include "comm/communicator.h"
#include "parallel/decode/decode_layout.h"

namespace isomer {

/// RMSNorm, queries of the rank's heads [T, h', n + r or head_dim] with rope, and the new tokens' rows into the cache.
Tensor project_and_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& x);

/// Queries for cached rows, [T, h', w_k]: latent attention's absorbed ones [W_UKᵀ q_nope | q_pe]; else q itself.
Tensor absorb(RankContext& ctx, const DecodeBlock& block, const Tensor& q);
/// Values [T, h', v] of what a core gave over cached rows, [T, h', w_v]: W_UV õ; else `core` itself.
Tensor values_of(RankContext& ctx, const DecodeBlock& block, const Tensor& core);

/// Attention over one set of keys.
struct PartialAttention {
  Tensor out;  // [T, heads, w], in the activations' dtype
  Tensor lse;  // [heads, T] float32 (float64 for float64), natural logarithm
};
/// Of queries [T, heads, w_k] over the rows that this rank caches, each sequence by itself, so that what a sequence
/// gets does not depend on its neighbours in the step.
PartialAttention attend_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& q);

/// Rows of a block of positions of a sequence, in the activations' dtype; runs say which.
struct CachedRows {
  Tensor keys;    // [count, KV heads, w_k]
  Tensor values;  // [count, KV heads, w_v]; latent attention: not defined
  std::vector<TokenRun> runs;
};
using RowSource = std::function<CachedRows(const StepSequence& sequence, IndexRange positions)>;
/// Those of them that this rank caches.
CachedRows load_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence, IndexRange positions);

/// Attention of q [T, h', n + r or head_dim] over all positions up to each query's own: blocks of kPrefixBlock
/// positions from `source` in turn, latent rows up-projected for the rank's heads, merged by LSE in float32. Block
/// bounds are multiples of kPrefixBlock whatever the step's own are. [T, h', v].
Tensor attend_prefix(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const RowSource& source);
inline constexpr std::int64_t kPrefixBlock = 512;

/// y = x + s·(Σ over ranks of attention·W_oᵀ + bias): W_o of the rank's heads, an all-reduce, the residual.
Tensor join_heads(RankContext& ctx, const DecodeBlock& block, const Tensor& attention, const Tensor& x);

/// The second half of a layer on ranks that split the intermediate widths: y = x + s·(all-reduced FFN(RMSNorm(x))).
Tensor decode_ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x);

}  // namespace isomer
