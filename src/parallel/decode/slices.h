// What helix and medha share: heads dealt to TPA columns, the sequence of each column to KVP slices, rank = slice · TPA
// + column; and the partial results of the slices, packed [out | lse], a message a peer.
#pragma once

#include <memory>
#include <vector>

#include "parallel/decode/stages.h"

namespace isomer {

class Slices {
 public:
  /// Collective over the layout's ranks.
  Slices(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config);

  int slice() const { return of_column_->rank(); }
  int column() const { return of_slice_->rank(); }
  int num_slices() const { return of_column_->size(); }
  /// Ranks of this column, by slice; ranks of this slice, by column.
  Communicator& of_column() const { return *of_column_; }
  Communicator& of_slice() const { return *of_slice_; }
  /// The column's heads, and which of its query heads (from 0) a slice has for itself.
  const HeadCut& heads() const { return heads_; }
  IndexRange own(int slice) const { return balanced_part(heads_.query.count, num_slices(), slice); }

 private:
  std::unique_ptr<Communicator> of_column_, of_slice_;
  HeadCut heads_;
};

/// Heads and rank of a column: what WeightSplit.heads is under these layouts.
HeadCut column_of_rank(const DecodeLayout& layout, const ModelConfig& config, int rank);

/// Attention of the step's sequences over this rank's slice: in prefill of q [T, heads, n + r or head_dim], values v a
/// head; in decode of absorbed queries, values of the cached width or, with `values_before`, v.
PartialAttention attend_slice(RankContext& ctx, const DecodeBlock& block, const Tensor& q, bool values_before);

/// Rows [out | lse] of a partial result: [T, heads, w + packed_lse_elements], communication.
Tensor packed(RankContext& ctx, const PartialAttention& partial);
/// A buffer for the packed rows that all slices send of `heads` heads: [slices, T, heads, w + packed_lse_elements].
Tensor packed_of_slices(RankContext& ctx, int num_slices, std::int64_t rows, std::int64_t heads,
                        const PartialAttention& like);
/// The merged result [T, heads, w] of such a buffer.
Tensor merged(RankContext& ctx, const Tensor& packed_parts);

}  // namespace isomer
