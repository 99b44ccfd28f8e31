// A model whose latent is cut into shards, on one rank: the shards' attention one after another, each exactly what a
// rank of the decode layout computes (model-math: TPLA), in one causal pass over a sequence. Rows before a sequence's
// exact_rows are exact MLA, and the others see the latents that these left behind: one such pass equals a prefill and a
// loop of decode steps, token by token.
#pragma once

#include <span>
#include <vector>

#include "eval/scored_rows.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/tpla.h"
#include "sharding/tokens.h"

namespace isomer {

/// What is evaluated. Everything referred to must stay alive.
struct ShardedModel {
  const ModelConfig& config;
  const ModelWeights& weights;             // float32 or float64; rewritten by `isomer convert tpla` for tpla
  TplaOptions options;                     // gla reads num_shards alone
  std::span<const TplaLayer> layers = {};  // of every layer; none for gla
  LatentSharding sharding = LatentSharding::tpla;
};

class ShardedForward : public LogitSource {
 public:
  /// Throws std::invalid_argument for options that don't fit the model, heads that a gla's groups don't divide, scalars
  /// of another number of layers, weights in bfloat16.
  explicit ShardedForward(const ShardedModel& model);

  Tensor logits(RankContext& ctx, std::span<const ScoredSequence> sequences) override;

  /// Attention of one layer before W_o, [T, h, v]: what logits() does to q [T, h, n + r] (rotated), the latent rows
  /// [ĉ | RoPE(k_pe)] [T, d + r] and c [T, d] before its norm. For tests against the reference.
  Tensor attention(RankContext& ctx, std::int64_t layer, std::span<const ScoredSequence> sequences, const Tensor& q,
                   const Tensor& latent, const Tensor& c) const;

 private:
  struct Operands;
  const LayerWeights& layer_weights(std::int64_t layer) const {
    return model_.weights.layers[static_cast<std::size_t>(layer)];
  }
  void add_shard(RankContext& ctx, const Operands& in, int shard, const Tensor& out) const;
  Tensor shard_keys(RankContext& ctx, const Operands& in, int shard) const;
  void norm_decoded_rows(const Operands& in, int shard, const Tensor& keys) const;
  Tensor shard_queries(RankContext& ctx, const Operands& in, int shard, IndexRange heads) const;
  void exact_rows(RankContext& ctx, const Operands& in, const Tensor& out) const;

  const ShardedModel model_;
};

}  // namespace isomer
