// What schemes share whose caches have a part of the latent row's columns (gla, tpla, exact-latent).
//
//   row [ĉ | RoPE(k_pe)]   0 …… m │ shard 0 │ shard 1 │ …      k_pe            of g ranks, rank i caches
//                          shared │ (d − m)/g each    │        whole or cut    [shared | shard i | k_pe]
//
// Prefill is exact multi-head latent attention by heads, as in tp: the step's own rows are whole on every rank, those
// of the prefix are gathered from the g ranks, block by block; then the row is cut and kept.
#pragma once

#include <memory>

#include "parallel/decode/stages.h"

namespace isomer {

class LatentShards {
 public:
  /// Rank i of `comm` has shard i mod g; ranks of i / g hold one whole row together. Collective.
  LatentShards(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config);

  Communicator& group() const { return *group_; }
  int shard() const { return group_->rank(); }
  int num_shards() const { return group_->size(); }
  /// What a row of this rank's cache is, in its order: columns of ĉ that all have, its own, those of the rope key.
  IndexRange shared() const { return {0, shared_}; }
  IndexRange own() const { return own_of(shard()); }
  IndexRange rope() const { return rope_of(shard()); }

  /// [T, 1, shared + own + rope] of whole rows [T, 1, d + r].
  Tensor cut(RankContext& ctx, const Tensor& rows) const;
  /// Prefill: x → x + attention(RMSNorm(x)), exact; caches cut rows.
  Tensor explicit_attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;

 private:
  IndexRange own_of(int shard) const { return {shared_ + shard * width_, width_}; }
  IndexRange rope_of(int shard) const { return {whole_rope_ ? 0 : shard * rope_width_, rope_width_}; }
  CachedRows gather_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence,
                         IndexRange positions) const;

  std::unique_ptr<Communicator> group_;
  std::int64_t latent_ = 0, shared_ = 0, width_ = 0, rope_width_ = 0;
  bool whole_rope_ = true;
};

}  // namespace isomer
