// Parameters that one device of a training layout holds.
#pragma once

#include "plan/decode_operations.h"
#include "plan/train_layout.h"

namespace isomer {

struct TrainParameters {
  double shared = 0;        // the same on all SP·DP devices of its stage and columns
  double experts = 0;       // routed experts, the same on SP·DP/EP
  double layer_shared = 0;  // of one MoE (or dense) layer: what ZeRO-3 gathers at a time
  double layer_experts = 0;
};

inline TrainParameters train_parameters(const ModelConfig& c, const TrainLayout& layout) {
  const DecodeShards columns{.tpa = layout.tp, .tpf = layout.tp};
  const DecodeWeights w = decode_weights(c, columns);
  const StageLayers layers = stage_layers(c, layout.pp);
  const double routed = 3.0 * static_cast<double>(c.moe.n_routed_experts) * static_cast<double>(c.hidden_size) *
                        static_cast<double>(c.moe.moe_intermediate_size) / layout.tp;
  const auto dense = static_cast<double>(layers.dense), moe = static_cast<double>(layers.moe);
  const double ends = layout.pp > 1 ? std::max(w.embedding, w.head) : w.embedding + w.head;
  TrainParameters p;
  p.layer_experts = moe > 0 ? routed / layout.ep : 0;
  p.layer_shared = w.attention + (moe > 0 ? w.moe_ffn - routed : w.dense_ffn);
  p.experts = moe * p.layer_experts;
  p.shared = dense * (w.attention + w.dense_ffn) + (moe > 0 ? moe * p.layer_shared : 0) + ends;
  return p;
}

}  // namespace isomer
