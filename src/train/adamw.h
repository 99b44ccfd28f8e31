// AdamW (Loshchilov & Hutter, arXiv 1711.05101) on flat float32 buffers, warm-up and cosine, clipping by the global
// norm.
#pragma once

#include <cstdint>

#include "core/rank_context.h"
#include "train/parameters.h"

namespace isomer {

struct AdamWOptions {
  double learning_rate = 3e-3;
  double min_learning_rate = 3e-4;  // where the cosine ends
  std::int64_t warmup_steps = 100;
  double beta1 = 0.9, beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip_norm = 1;  // 0: no clipping
};

/// Rate of step `step` (from 0) of `total`: linear from 0 to the full rate over the warm-up, then a cosine to the
/// minimum at the last step.
double learning_rate(const AdamWOptions& options, std::int64_t step, std::int64_t total);

/// ‖gradient‖₂ in float64, summed over fixed blocks in order: the same on any number of threads.
double gradient_norm(RankContext& ctx, const Parameters& parameters);

/// One step on master weights and moments. The gradient is multiplied by min(1, clip_norm / norm) on the way; `step`
/// counts from 0. Decay is decoupled: w −= rate·weight_decay·w.
void adamw_step(RankContext& ctx, Parameters& parameters, const AdamWOptions& options, std::int64_t step, double rate,
                double norm);

}  // namespace isomer
