// A step scheme: how one step of inference runs when a model, and the cache of its sequences, are spread over ranks by
// a decode layout (cost/decode_layout.h). One file a scheme; the stages it composes are in stages.h. A step's
// activations stand whole on every rank: T rows of D, the new tokens of all its sequences.
//
// To add one: its file, a line in registry.cpp, its rows in rank_cache_of; its bytes in cost/decode_bytes.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "comm/communicator.h"
#include "cost/decode_layout.h"
#include "layers/attention_layer.h"
#include "layers/ffn.h"
#include "model/model_weights.h"
#include "model/tpla.h"
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
  std::int64_t num_rows = 0;  // of this rank's sequences
  /// Data parallelism: rows of every group's sequences.
  std::vector<std::int64_t> rows_of_group;
  /// A prefill: exact under every layout, latent attention with up-projected keys and values, a block of the prefix at
  /// a time (many query tokens). Otherwise a decode step: the absorbed form on latent rows (few), in the layout's way.
  bool explicit_form = false;
  RopeRows rope;
};

/// Weights of one cut, views of the whole model's, and the configuration with as many query heads as they have.
struct ModelPart {
  ModelConfig local;
  ModelWeights weights;  // another rank's experts are undefined
  WeightSplit split;
};

/// One rank's part of a model.
struct DecodeModel {
  ModelConfig config;
  ModelPart explicit_part;  // attention in prefill; FFNs, norms, embedding, head always
  ModelPart absorbed_part;  // attention in decode
};

/// One layer in one step.
struct DecodeBlock {
  const DecodeModel& model;
  std::int64_t index = 0;
  const DecodeStep& step;
  KvCache& cache;
  Communicator& comm;  // of the layout's ranks

  const ModelPart& part() const { return step.explicit_form ? model.explicit_part : model.absorbed_part; }
  const LayerWeights& weights() const { return part().weights.layers[static_cast<std::size_t>(index)]; }
  AttentionLayer attention_layer() const { return {part().local, weights().attention, step.rope}; }
  std::int64_t heads() const { return part().local.num_attention_heads; }
  bool is_latent() const { return model.config.attention == AttentionKind::mla; }
  DType dtype() const { return model.explicit_part.weights.norm.dtype(); }
};

class StepScheme {
 public:
  virtual ~StepScheme() = default;
  /// Weights that prefill and the FFNs work with: heads over all ranks unless said.
  virtual WeightSplit explicit_split(int rank) const = 0;
  /// Attention weights that decode works with.
  virtual WeightSplit absorbed_split(int rank) const { return explicit_split(rank); }
  /// Stores the new tokens' cache rows; x [T, D] → x + attention(RMSNorm(x)), the same bits on every rank.
  virtual Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const = 0;
  /// x [T, D] → x + FFN(RMSNorm(x)), the same bits on every rank.
  virtual Tensor ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
};

/// Families that the engine runs, in the order of reports.
const std::vector<std::string>& step_scheme_names();

/// What a converted checkpoint's side file says (convert/side_file.h), for the layout `tpla`.
struct TplaModel {
  TplaOptions options;
  std::vector<TplaLayer> layers;
};

/// What a scheme is made from.
struct SchemeArguments {
  Communicator& comm;  // the layout's ranks; groups of a scheme's own are split from it
  const DecodeLayout& layout;
  const ModelConfig& config;
  const TplaModel* tpla = nullptr;  // must outlive the scheme
};

/// Why the engine can't run a model under a layout, with what would fit; empty if it can. `tpla`: the model's side
/// file, where it has one.
std::string why_step_unfit(const DecodeLayout& layout, const ModelConfig& config, const TplaModel* tpla = nullptr);

/// The layout as it runs on a converted checkpoint: `tpla` without a number of shared columns takes the side file's.
DecodeLayout complete_layout(DecodeLayout layout, const TplaModel* tpla);

/// A remark on rows that several ranks cache alike because more ranks split heads than there are KV heads; empty where
/// none do.
std::string cache_copies_note(const DecodeLayout& layout, const ModelConfig& config);

/// Collective. Throws std::invalid_argument where why_step_unfit has a reason.
std::unique_ptr<StepScheme> make_step_scheme(const SchemeArguments& arguments);

/// dp-ep in a dry run, where no router chooses: what the rows of a rank are routed by in a layer, uniform draws.
Routing dry_routing(const ModelConfig& config, std::int64_t layer, int rank, std::int64_t rows);

/// How a sequence's positions are dealt to slices.
CacheShards cache_shards_of(const DecodeLayout& layout);
/// What a rank caches under a layout that fits: an index map, the same for whoever asks.
RankCache rank_cache_of(const DecodeLayout& layout, const ModelConfig& config, int rank);
/// What one token's row is in such a cache.
CacheRowShape cache_row_shape(const ModelConfig& config, const RankCache& cache);

/// The rank's parts of a model: views, no copies.
DecodeModel cut_model(const ModelConfig& config, const ModelWeights& weights, const StepScheme& scheme, int rank);

/// All ranks share heads and FFN: part `rank` of the layout's. `split_kv_heads` as in WeightSplit.
WeightSplit even_split(const DecodeLayout& layout, int rank, bool split_kv_heads);
/// The same with heads dealt as they go, at least one to each rank (latent attention).
WeightSplit dealt_split(const DecodeLayout& layout, const ModelConfig& config, int rank);

// The factories, one a file.
std::unique_ptr<StepScheme> make_tp(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_gla(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_tpla(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_exact_latent(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_kvp(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_dp_ep(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_medha(const SchemeArguments& arguments);
std::unique_ptr<StepScheme> make_helix(const SchemeArguments& arguments);

}  // namespace isomer
