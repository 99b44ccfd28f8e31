// A decoder language model on one rank of a sequence-parallel (times data-parallel) layout: embedding, layers, head.
// Which tokens a rank has is the layout's business; FFN and head work on the rank's own tokens.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/ffn.h"
#include "layers/head.h"
#include "parallel/sequence/scheme.h"
#include "train/batches.h"
#include "train/parameters.h"

namespace isomer {

struct LanguageModelOptions {
  ModelConfig config;
  Layout layout;
  DType dtype = DType::f32;
  AttentionCore core = AttentionCore::fused;
  std::int64_t seq = 0;
  std::int64_t batch = 1;  // sequences a call
};

/// Where the routing of a layer comes from, if not computed; and who is shown what a layer used (in the forward).
using RoutingOf = std::function<RoutingSource(std::int64_t layer)>;
using RoutingSink = std::function<void(std::int64_t layer, const Routing& routing)>;

class LanguageModel {
 public:
  /// Collective over all ranks. Throws std::invalid_argument for a layout that doesn't fit.
  LanguageModel(RankContext& ctx, LanguageModelOptions options);

  const LanguageModelOptions& options() const { return options_; }
  const SequenceGroups& groups() const { return groups_; }
  const TokenShards& tokens() const { return tokens_; }

  /// What each of this rank's rows is: b·seq + position, b counting the sequences of a call. [count(rank)·batch]
  std::vector<std::int64_t> row_tokens() const;

  /// Samples of this replica, options().batch of them, each seq tokens. Adds the gradients of scale · (sum of the
  /// losses of this rank's targets) to parameters.gradient and returns that sum.
  HeadLoss forward_backward(RankContext& ctx, const Parameters& parameters, std::span<const Sample> samples,
                            double scale);
  /// −ln p of each of this rank's targets (0 where there is none), [count(rank)·batch] in the order of its rows.
  std::vector<double> token_losses(RankContext& ctx, const ModelWeights& weights, std::span<const Sample> samples);

  /// The logits of this rank's rows, [count(rank)·batch, V] float32: for few or short samples, they stand whole.
  Tensor logits(RankContext& ctx, const ModelWeights& weights, std::span<const Sample> samples);

  /// Sums parameters.gradient over all ranks of all replicas. Phase gradient_sync.
  void sync_gradients(RankContext& ctx, const Parameters& parameters) const;

  void set_routing(RoutingOf source) { routing_of_ = std::move(source); }
  void set_routing_sink(RoutingSink sink) { routing_sink_ = std::move(sink); }

 private:
  struct LayerSaved {
    Tensor x;  // kept alone where the layer is recomputed
    std::unique_ptr<SequenceScheme::Saved> attention;
    FfnSaved ffn;
    Routing routing;  // of a recomputed layer, so that both passes agree
  };
  /// This rank's rows of the samples: the i-th token it holds, of sequence b, is row i·batch + b.
  struct Rows {
    std::vector<std::int32_t> ids, targets;
    std::vector<std::vector<std::int64_t>> documents;  // per sequence: positions where documents begin
  };
  Rows rows_of(RankContext& ctx, std::span<const Sample> samples) const;
  SequenceBlock block_of(const ModelWeights& weights, std::int64_t layer, const Rows& rows) const;
  Tensor layer_forward(RankContext& ctx, const ModelWeights& weights, std::int64_t layer, const Rows& rows, Tensor x,
                       const RoutingSource& routing, LayerSaved& saved);
  Tensor layer_backward(RankContext& ctx, const Parameters& parameters, std::int64_t layer, const Rows& rows,
                        LayerSaved saved, Tensor dy);
  Tensor layers_forward(RankContext& ctx, const ModelWeights& weights, const Rows& rows,
                        std::vector<LayerSaved>* saved);
  RoutingSource routing_source(std::int64_t layer) const;
  void add_gradients(RankContext& ctx, const Parameters& parameters, std::int64_t layer, const BlockGradients& block);
  void add_gradients(RankContext& ctx, const Parameters& parameters, std::int64_t layer, const FfnGradients& ffn);
  void add_gradient(RankContext& ctx, const Parameters& parameters, const std::string& name, const Tensor& gradient,
                    std::int64_t first_row = 0);
  Tensor gradient_of(const Parameters& parameters, const std::string& name) const;

  LanguageModelOptions options_;
  bool recomputes_layers_ = false;
  std::unique_ptr<SequenceScheme> scheme_;
  TokenShards tokens_;
  SequenceGroups groups_;
  RopeRows rope_;
  RoutingOf routing_of_;
  RoutingSink routing_sink_;
  bool up_projection_by_heads_ = false;  // ranks hold the gradients of their own heads of kv_b_proj
};

}  // namespace isomer
