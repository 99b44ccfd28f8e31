// Rotary position embedding: frequencies and the cos/sin table, in float64, once per run. Applying it is a kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace isomer {

/// Inverse frequencies of the r/2 pairs after scaling, and the factor on cos and sin.
struct RopeFrequencies {
  std::vector<double> inv_freq;  // [r/2]
  double magnitude = 1;          // yarn and longrope multiply cos and sin by it
};

/// `rope_dim` = r (MLA) or head_dim (GQA), even. `max_position` is the number of positions the run covers (largest +
/// 1): longrope takes its long factors when it exceeds original_max_position_embeddings; its magnitude uses rope.factor
/// = max_position_embeddings / original_max_position_embeddings. Without rotation (rope.rotate false) cos is 1, sin 0.
/// Throws std::invalid_argument naming the parameter for values that no scaling can use.
RopeFrequencies rope_frequencies(const RopeConfig& rope, std::int64_t rope_dim, std::int64_t max_position);

/// Rows of cos and sin for given positions: cos[row · r/2 + i], magnitude included, rounded once from float64.
struct RopeTable {
  std::int64_t rope_dim = 0;
  std::vector<double> cos, sin;
};
RopeTable rope_table(const RopeConfig& rope, std::int64_t rope_dim, const std::vector<std::int64_t>& positions,
                     std::int64_t max_position);

}  // namespace isomer
