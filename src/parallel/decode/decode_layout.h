// A decode layout: how one step of inference runs when a model, and the cache of its sequences, are spread over ranks.
// One file a layout; the stages it composes are in stages.h and ffn.h. A step's activations stand whole on every rank:
// T rows of D, the new tokens of all its sequences.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "layers/attention_layer.h"
#include "model/model_weights.h"
#include "sharding/layout.h"
#include "sharding/weight_slices.h"

namespace isomer {

/// The part of one sequence in a step. Its cache has been grown by `positions` already.
struct StepSequence {
  int sequence = 0;            // the cache's id
  std::int64_t first_row = 0;  // of the step's T rows
  IndexRange positions;        // of its new tokens, consecutive
};

/// Host metadata of a step, and cos and sin of its rows.
struct DecodeStep {
  std::vector<StepSequence> sequences;
  std::int64_t num_rows = 0;
  /// Latent attention: up-projected keys and values, a block of the prefix at a time (many query tokens), instead of
  /// the absorbed form, which works on latent rows (few). The function is the same.
  bool explicit_form = false;
  RopeRows rope;
};

/// One rank's part of a model. `local` is the whole configuration with this rank's number of query heads.
struct DecodeModel {
  ModelConfig config, local;
  ModelWeights weights;  // views of the whole model's
  TensorParallel parallel;
};

/// One layer in one step.
struct DecodeBlock {
  const DecodeModel& model;
  std::int64_t index = 0;
  const DecodeStep& step;
  KvCache& cache;

  const LayerWeights& weights() const { return model.weights.layers[static_cast<std::size_t>(index)]; }
  AttentionLayer attention_layer() const { return {model.local, weights().attention, step.rope}; }
  bool is_latent() const { return model.config.attention == AttentionKind::mla; }
};

class DecodeLayout {
 public:
  virtual ~DecodeLayout() = default;
  /// Which weights of which heads the rank has.
  virtual TensorParallel parallel(int num_ranks, int rank) const = 0;
  /// How a sequence's positions are spread over the ranks' caches.
  virtual CacheShards cache_shards(int num_ranks) const = 0;
  /// Stores the new tokens' cache rows; x [T, D] → x + attention(RMSNorm(x)), the same bits on every rank.
  virtual Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const = 0;
};

/// Names of the layouts, in the order of reports.
const std::vector<std::string>& decode_layout_names();

/// Ranks of a layout ("tp:4" has 4; "tp" has 1). Throws std::invalid_argument for an unknown name or option.
int decode_ranks_of(const Layout& layout);
/// How it spreads a sequence's positions over caches. Throws as decode_ranks_of does.
CacheShards decode_cache_shards(const Layout& layout);
/// Throws as decode_ranks_of does, and for a model that does not fit.
std::unique_ptr<DecodeLayout> make_decode_layout(const Layout& layout, const ModelConfig& config);
/// Why a layout can't run this model, with what would fit; empty if it can. Throws as decode_ranks_of does.
std::string why_decode_unfit(const Layout& layout, const ModelConfig& config);

/// This rank's part of a model under a layout: views, no copies.
DecodeModel cut_model(const ModelConfig& config, const ModelWeights& weights, const TensorParallel& parallel);
/// What one token's cache row is on a rank.
CacheRowShape cache_row_shape(const ModelConfig& config, const TensorParallel& parallel);

// The factories, one a file.
std::unique_ptr<DecodeLayout> make_tp();
std::unique_ptr<DecodeLayout> make_kvp();

}  // namespace isomer
