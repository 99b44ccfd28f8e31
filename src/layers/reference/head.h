// Float64 reference of the last norm, the head and cross-entropy, forward and backward, token by token.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace isomer {

struct HeadReferenceResult {
  std::vector<double> logits;  // [T, V], divided by hidden_size/dim_model_base where the configuration says so
  std::vector<double> losses;  // [T], nats; 0 where not scored
  double loss_sum = 0;
  std::int64_t num_targets = 0, num_correct = 0;
  std::vector<double> dx, dnorm, dlm_head;  // of scale · loss_sum
};

/// x [T, D], norm [D], lm_head [V, D], targets [T] (negative: not scored).
HeadReferenceResult head_reference(const ModelConfig& config, const std::vector<double>& norm,
                                   const std::vector<double>& lm_head, const std::vector<double>& x,
                                   const std::vector<std::int32_t>& targets, double scale);

}  // namespace isomer
