// How many tokens a step sent to each expert, over all ranks, and V3's balancing by it (arXiv 2412.19437, 2.1.2).
#pragma once

#include <cstdint>
#include <vector>

#include "core/rank_context.h"
#include "layers/ffn.h"
#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

class ExpertLoads {
 public:
  explicit ExpertLoads(const ModelConfig& config)
      : num_layers_(config.num_hidden_layers), num_experts_(config.moe.n_routed_experts) {}

  /// Zero, for a new step.
  void clear() { loads_.assign(static_cast<std::size_t>(num_layers_ * num_experts_), 0.0); }
  /// Adds what one forward of this rank used.
  void count(std::int64_t layer, const Routing& routing);
  /// Sums over all ranks; nothing to do for a dense model. Phase gradient_sync.
  void sum_over_ranks(RankContext& ctx);

  /// Balancing without an auxiliary loss: the correction bias of an expert above its layer's mean load loses `rate`,
  /// that of one below gains it. The same on every rank once loads are summed.
  void update_correction_biases(const ModelWeights& weights, double rate) const;
  /// The largest load of an expert in means of its layer; 0 without experts.
  double largest() const;

 private:
  std::int64_t num_layers_, num_experts_;
  std::vector<double> loads_;  // [num_layers, num_experts]
};

}  // namespace isomer
