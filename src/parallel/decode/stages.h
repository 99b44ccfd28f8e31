// The stages of a layer in decode, which schemes compose. T rows of a step, h' the rank's query heads, w_k
// and w_v the widths of a cached key and value (latent attention: d + r and d; grouped-query: head_dim).
#pragma once

#include <functional>
#include <span>

#include "parallel/decode/step_scheme.h"

namespace isomer {

/// What a layer's new tokens give.
struct Projections {
  Tensor q;  // [T, h', n + r or head_dim], with rope
  /// Latent attention: [T, 1, d + r], whole rows [ĉ | RoPE(k_pe)]; else keys [T, KV heads, head_dim], with rope.
  Tensor keys;
  Tensor values;  // [T, KV heads, head_dim]; latent attention: not defined
  Tensor c;       // latent attention: [T, d] before kv_a_layernorm, where there is one
};
/// RMSNorm, then queries of the rank's heads, and keys and values.
Projections project(RankContext& ctx, const DecodeBlock& block, const Tensor& x);
/// The same of `layer`, whose query heads may be others than the part's.
Projections project(RankContext& ctx, const DecodeBlock& block, const AttentionLayer& layer, const Tensor& x);
/// Stores the step's rows; their widths are the cache's.
void store_rows(RankContext& ctx, const DecodeBlock& block, const Tensor& keys, const Tensor& values);
/// Both, where the cache has whole rows. Returns q.
Tensor project_and_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& x);

/// Columns of a latent row that queries are made for: ranges of ĉ (0 … d − 1), one behind the other, then a range of
/// the rope key (0 … r − 1).
struct LatentColumns {
  std::vector<IndexRange> latent;
  IndexRange rope;
};
/// Queries for cached rows of these columns, [T, heads, Σ latent + rope]: [W_UKᵀ q_nope | q_pe]. q and core have the
/// heads of the part from `first_head` on.
Tensor absorb(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const LatentColumns& columns,
              std::int64_t first_head = 0);
/// Values [T, heads, v] of what a core gave over them, [T, heads, latent]: W_UV õ.
Tensor values_of(RankContext& ctx, const DecodeBlock& block, const Tensor& core, IndexRange latent,
                 std::int64_t first_head = 0);
/// The same over whole rows; with grouped-query attention they give back what they are given.
Tensor absorb(RankContext& ctx, const DecodeBlock& block, const Tensor& q, std::int64_t first_head = 0);
Tensor values_of(RankContext& ctx, const DecodeBlock& block, const Tensor& core, std::int64_t first_head = 0);

/// Attention over one set of keys.
struct PartialAttention {
  Tensor out;  // [T, heads, w], in the activations' dtype
  Tensor lse;  // [heads, T] float32 (float64 for float64), natural logarithm
};
/// Of queries [T, heads, w_k] over the rows that this rank caches, each sequence by itself, so that what a sequence
/// gets does not depend on its neighbours in the step.
PartialAttention attend_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& q);
/// The same of some sequences of the step.
PartialAttention attend_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& q,
                              std::span<const StepSequence> sequences);

/// Rows of a block of positions of a sequence, in the activations' dtype; runs say which.
struct CachedRows {
  Tensor keys;    // [count, KV heads, w_k]
  Tensor values;  // [count, KV heads, w_v]; latent attention: not defined
  std::vector<TokenRun> runs;
};
using RowSource = std::function<CachedRows(const StepSequence& sequence, IndexRange positions)>;
/// Those of them that this rank caches.
CachedRows load_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence, IndexRange positions);

/// Attention of q [T, h', n + r or head_dim] over those of the positions up to each query's own that `source` gives:
/// blocks of kPrefixBlock positions in turn, latent rows up-projected for the rank's heads, merged by LSE in float32.
/// Block bounds are multiples of kPrefixBlock whatever the step's own are. out [T, h', v].
PartialAttention attend_prefix(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const RowSource& source);
inline constexpr std::int64_t kPrefixBlock = 512;

/// Shows an intermediate of the layer to whoever observes the run, as "layer.N.name".
void observe(RankContext& ctx, const DecodeBlock& block, std::string_view name, const Tensor& tensor);

/// The tensor itself, or a copy in another dtype.
Tensor as_dtype(RankContext& ctx, std::string_view name, const Tensor& t, DType dtype);

/// y = x + s·(Σ over ranks of attention·W_oᵀ + bias): W_o of the rank's heads, an all-reduce, the residual.
Tensor join_heads(RankContext& ctx, const DecodeBlock& block, const Tensor& attention, const Tensor& x);
/// The same with the W_o of another cut than the step's.
Tensor join_heads(RankContext& ctx, const DecodeBlock& block, const AttentionWeights& weights, const Tensor& attention,
                  const Tensor& x);

/// The rank's part of FFN(RMSNorm(x)), [T, D]: a sum over ranks gives the whole.
Tensor ffn_part(RankContext& ctx, const DecodeBlock& block, const Tensor& x);
/// y ← x + s·y.
void add_residual(RankContext& ctx, const DecodeBlock& block, const Tensor& y, const Tensor& x);
/// The second half of a layer on ranks that split the intermediate widths: y = x + s·(all-reduced FFN(RMSNorm(x))).
Tensor decode_ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x);

}  // namespace isomer
