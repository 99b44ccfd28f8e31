// Per layer and head, what a shard of the latent sees of the logits (claims T10): for a checkpoint that was converted
// for sharded decode, on any text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "convert/calibration.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/tpla.h"

namespace isomer {

/// One layer; [h, g] unless said.
struct LayerHeads {
  std::vector<double> cosine;      // of a shard's logits and the whole ones, centred per query
  std::vector<double> divergence;  // KL(softmax whole ‖ softmax shard), nats, mean over queries
  std::vector<double> kappa;       // used
  std::vector<double> lsq_kappa;   // what least squares on this text gives
  std::vector<double> shares;      // [1 + g]: of the second moment, in the shared columns and in each shard
};

/// By layer. `weights` are the converted checkpoint's in float32, `scalars` its side file's.
std::vector<LayerHeads> measure_heads(const ModelConfig& config, const ModelWeights& weights,
                                      const TplaOptions& options, std::span<const TplaLayer> scalars,
                                      std::span<const Sample> samples, int num_threads,
                                      const ConversionProgress& progress);

/// Mean of the entries of shard i over all heads of values [h, g].
double mean_over_heads(const std::vector<double>& values, int num_shards, int shard);

}  // namespace isomer
