// What goes into each layer of a model while it reads text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "convert/calibration.h"
#include "convert/transmla.h"
#include "model/model_weights.h"
#include "train/batches.h"

namespace isomer {

/// Runs every sample through the training forward on one rank and calls sink(sample, layer, x), x [T, D] the layer's
/// input before its norm, valid during the call. `weights` in float32; all samples are of one length.
void observe_layer_inputs(const ModelConfig& config, const ModelWeights& weights, std::span<const Sample> samples,
                          int num_threads, const std::function<void(std::int64_t, std::int64_t, const Tensor&)>& sink);

/// Second moments of the layers' inputs behind their norms, by layer. The same bits whatever `num_threads`.
std::vector<InputMoment> collect_input_moments(const ModelConfig& config, const ModelWeights& weights,
                                               std::span<const Sample> samples, int num_threads,
                                               const ConversionProgress& progress);

}  // namespace isomer
