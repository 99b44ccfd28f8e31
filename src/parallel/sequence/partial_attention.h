// Attention over keys that come in parts (blocks of a ring, of a gathered latent): each part's result is merged by its
// log-sum-exp, and a part's backward adds to float32 sums. What causality hides is neither computed nor merged.
#pragma once

#include <vector>

#include "parallel/sequence/scheme.h"

namespace isomer {

/// Queries of the rank: rows of `positions`, in order, interleaved by batch.
struct PlacedQueries {
  Tensor q;                           // [rows, heads, key_width]
  Tensor q_rope;                      // [rows, heads, rope_width], optional
  std::vector<IndexRange> positions;  // as TokenShards has them, without the block's first_position
};
/// A part of the keys, likewise.
struct PlacedKeys {
  Tensor k, v;    // [rows, kv_heads, key_width | value_width]
  Tensor k_rope;  // [rows, 1, rope_width], given exactly where q_rope is
  std::vector<IndexRange> positions;
};

/// True if any of these queries sees any of these keys.
bool sees_any(const std::vector<IndexRange>& queries, const std::vector<IndexRange>& keys);

/// The forward's running result. The first part must hold keys that every query sees: the rank's own come first.
class MergedAttention {
 public:
  MergedAttention(RankContext& ctx, const SequenceBlock& block, PlacedQueries queries)
      : ctx_(ctx), block_(block), queries_(std::move(queries)) {}
  void add(const PlacedKeys& keys);
  /// out in the queries' dtype and lse, both saved. Partial results were merged in float32.
  CoreSaved finish();

 private:
  void begin(const PlacedKeys& keys);

  RankContext& ctx_;
  const SequenceBlock& block_;
  PlacedQueries queries_;
  Tensor out_;  // [rows, heads, value_width]; float32 once a second part was merged
  Tensor lse_;  // [heads, rows]
};

/// Adds one part's share: dq and dq_rope over all rows of the queries, dk, dv and dk_rope over the part's; all float32,
/// zero before the first part. `core` is the whole attention's.
struct PartGradients {
  Tensor dq, dq_rope, dk, dv, dk_rope;
};
void attention_part_backward(RankContext& ctx, const SequenceBlock& block, const PlacedQueries& queries,
                             const PlacedKeys& keys, const CoreSaved& core, const Tensor& dout,
                             const PartGradients& gradients);

/// `sum` in `dtype`: itself if it has it already.
Tensor rounded(RankContext& ctx, std::string_view name, const Tensor& sum, DType dtype);

}  // namespace isomer
