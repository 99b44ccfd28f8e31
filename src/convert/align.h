// Layer-wise alignment (claims T11): kv_b of a rewritten layer, trained until its sharded attention gives what the
// whole attention gave. Every layer by itself, on the inputs that the original model gives it, with AdamW:
//
//   loss = Σ ‖W_o A − W_o A*‖² / Σ ‖W_o A*‖²,   A* whole attention with kv_b as rewritten, A the shards' with kv_b
//   trained
//
// Whole attention with the trained kv_b is then another function than the original model: a lossy step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "convert/calibration.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/tpla.h"
#include "train/batches.h"

namespace isomer {

struct AlignmentOptions {
  std::int64_t steps = 0;       // a layer and window each; 0: none
  std::int64_t windows = 16;    // of the calibration text, at most; one of them is held out
  double learning_rate = 0.01;  // times the root mean square of kv_b; a cosine to a tenth of it
};

struct AlignedLayer {
  std::vector<double> kv_b;      // [h(n + v), d]
  double before = 0, after = 0;  // the loss on the window held out (on the only one, where there is one)
};

/// By layer; `weights` are the original model's in float32, `layers` its rewritten ones with their rotations. Memory:
/// queries and keys of the windows, of all layers, in float32. The same bits whatever `num_threads`.
std::vector<AlignedLayer> align_layers(const ModelConfig& config, const ModelWeights& weights,
                                       const TplaOptions& options, std::span<const ShardedLayer> layers,
                                       std::span<const Sample> samples, const AlignmentOptions& alignment,
                                       int num_threads, const ConversionProgress& progress);

}  // namespace isomer
