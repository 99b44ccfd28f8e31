// The exact rewrite of an MLA layer into a rotated latent (model-math: TPLA), in float64:
//
//   kv_a[0:d] ← Uᵀ·kv_a[0:d] (and its bias),   kv_b ← kv_b·diag(γ)·U,   γ ← 1
//
// A rotation leaves the RMS of a row as it is, so it commutes with the norm
// once γ is part of the next matrix. Without a kv_a_layernorm kv_b ← kv_b·U.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace isomer {

/// The weights of a layer that the rewrite changes, float64.
struct LatentWeights {
  std::vector<double> kv_a;       // [d + r, D]
  std::vector<double> kv_a_bias;  // [d + r]; empty without
  std::vector<double> gamma;      // [d]; empty without kv_a_layernorm
  std::vector<double> kv_b;       // [h(n + v), d]
};

/// `u` [d, d] orthogonal, row-major. The same bits whatever `num_threads`. The rows of the rope key stay as they are.
LatentWeights rewrite_latent(const ModelConfig& config, LatentWeights weights, const std::vector<double>& u,
                             int num_threads);

/// The tensors' names below "model.layers.L.", and their members.
struct LatentWeightName {
  std::string_view name;
  std::vector<double> LatentWeights::*member;
};
const std::vector<LatentWeightName>& latent_weight_names();

}  // namespace isomer
