// How far the logits of one model lie from another's on the same tokens.
#pragma once

#include <cstdint>
#include <span>

#include "convert/calibration.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "train/batches.h"

namespace isomer {

struct LogitDifference {
  std::int64_t num_tokens = 0;
  double largest = 0;          // |difference| of two logits
  double largest_logit = 0;    // |logit| of the first model, to set it against
  double mean_divergence = 0;  // KL(first ‖ second), nats a token
  double largest_divergence = 0;
  std::int64_t top1_agreements = 0;
  double nats_first = 0, nats_second = 0;  // Σ −ln p over the tokens that have a target
  std::int64_t num_targets = 0;
};

/// A model whose parts somebody else keeps.
struct ModelRef {
  const ModelConfig& config;
  const ModelWeights& weights;
};

/// Both models whole in the training forward, in the weights' dtype, one sample at a time. Sums in float64, in token
/// order.
LogitDifference compare_logits(const ModelRef& first, const ModelRef& second, std::span<const Sample> samples,
                               int num_threads, const ConversionProgress& progress);
/// Two of one configuration.
LogitDifference compare_logits(const ModelConfig& config, const ModelWeights& first, const ModelWeights& second,
                               std::span<const Sample> samples, int num_threads, const ConversionProgress& progress);

}  // namespace isomer
