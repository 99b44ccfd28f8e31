// How the next token is chosen from logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace isomer {

struct Sampling {
  double temperature = 0;  // 0: greedy, the largest logit (the lowest id of equals)
  double top_p = 1;        // only the most probable tokens whose probabilities reach this sum, at least one
  std::uint64_t seed = 0;
};
/// Throws std::invalid_argument for a temperature below 0 or not finite, top_p outside (0, 1].
void check_sampling(const Sampling& sampling);

/// Row `row` of logits [rows, V] on the host.
std::vector<double> logits_of_row(const Tensor& logits, std::int64_t row);

/// Token `draw` of a sequence: depends on the logits, the sampling and `draw` alone. Throws isomer::Error for logits
/// that are not finite.
std::int32_t sample_token(std::span<const double> logits, const Sampling& sampling, std::int64_t draw);

}  // namespace isomer
