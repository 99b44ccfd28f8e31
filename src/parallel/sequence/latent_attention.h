// Attention over latent rows whose keys and values are rebuilt from them block by block inside the loop, so that they
// never stand whole in memory; the backward rebuilds them once more. Shared by latent-gather and latent-ring.
//
//   for a block of ĉ|k_pe rows:  [k_nope | v] = W_kv_b ĉ  →  attention of the rank's queries (rope parts apart)  →
//   merge backward:                    the same block again  →  dK, dV  →  d ĉ|d k_pe (float32), dW_kv_b += …
#pragma once

#include "parallel/sequence/partial_attention.h"

namespace isomer {

/// Latent rows of one group: positions in order, interleaved by batch.
struct LatentRows {
  Tensor rows;                        // [rows, d + r]
  Tensor kv;                          // [rows, heads, n + v]: kept instead of rebuilt; may be undefined
  std::vector<IndexRange> positions;  // as TokenShards has them
};

/// Tokens whose keys and values of `heads` heads stand in memory at once: some 2^25 elements, 512 to 2048 rows of all
/// sequences; `given` (an option of the layout) goes before.
std::int64_t rebuilt_rows(const ModelConfig& config, std::int64_t heads, std::int64_t given);

/// The option rows=N of a layout, 0 where there is none. Throws std::invalid_argument for anything but 1 to 2^20.
std::int64_t block_rows_of(const Layout& layout);

/// The attention of queries q [rows, heads, n + r] at `positions` over latent rows, part after part.
class LatentAttention {
 public:
  /// `block_rows`: see rebuilt_rows.
  LatentAttention(RankContext& ctx, const SequenceBlock& block, Tensor q, std::int64_t block_rows);

  /// The group's own rows come first.
  void add(const LatentRows& latent);
  CoreSaved finish() { return merged_.finish(); }

 private:
  RankContext& ctx_;
  const SequenceBlock& block_;
  PlacedQueries queries_;
  std::int64_t block_rows_;
  MergedAttention merged_;
};

/// Its backward. Gradients of kv_b_proj's rows of the rank's heads are summed into `gradients`.
class LatentAttentionBackward {
 public:
  LatentAttentionBackward(RankContext& ctx, const SequenceBlock& block, Tensor q, CoreSaved core, Tensor dout,
                          std::int64_t block_rows, BlockGradients& gradients);

  /// Adds the share of these rows: dlatent [rows, d + r], float32, zero before.
  void add(const LatentRows& latent, const Tensor& dlatent);
  /// dq [rows, heads, n + r] in q's dtype; frees all else.
  Tensor finish();

 private:
  void add_block(const Tensor& rows, const Tensor& kept_kv, const IndexRange& positions, const Tensor& dlatent);

  RankContext& ctx_;
  const SequenceBlock& block_;
  Tensor q_, dout_, dq_;  // dq_: the float32 sum
  CoreSaved core_;
  std::int64_t block_rows_;
  BlockGradients& gradients_;
};

}  // namespace isomer
