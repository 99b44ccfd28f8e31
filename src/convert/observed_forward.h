// The training forward with every attention layer's intermediates shown, in float64.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "train/batches.h"

namespace isomer {

/// All elements in row-major order, whatever the strides.
std::vector<double> widened(const Tensor& tensor);

/// One sample's rows of one layer.
struct ObservedLayer {
  std::int64_t sample = 0, layer = 0;
  std::vector<double> q;     // [T, h, n + r], rotated
  std::vector<double> c;     // [T, d], before kv_a_layernorm
  std::vector<double> k_pe;  // [T, r], rotated
};

/// Runs every sample through the model, one at a time on one rank, and calls `sink` for every layer, in order.
/// `weights` in float32; all samples are of one length. Throws std::invalid_argument for a model without MLA.
void observe_forward(const ModelConfig& config, const ModelWeights& weights, std::span<const Sample> samples,
                     int num_threads, const std::function<void(ObservedLayer&&)>& sink);

}  // namespace isomer
