// Float64 reference of a layer's second half on one rank, forward and backward: y = x + s·FFN(RMSNorm(x)), SwiGLU or a
// mixture of experts. Token by token and expert by expert, from the equations alone (model-math: Router); it shares
// nothing with the fast path.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

struct MlpReferenceWeights {
  std::vector<double> gate, up;  // [F, D]
  std::vector<double> down;      // [D, F]
};

struct FfnReferenceWeights {
  std::vector<double> norm;          // [D]
  MlpReferenceWeights mlp;           // of a dense layer
  std::vector<double> router, bias;  // [E, D] (empty: a dense layer), [E] or empty
  std::vector<MlpReferenceWeights> experts;
  MlpReferenceWeights shared;  // empty: none
};
/// A layer's weights, widened.
FfnReferenceWeights widened_ffn_weights(const LayerWeights& weights);

struct FfnReferenceResult {
  std::vector<double> y, dx;                             // [T, D]; dx empty without dy
  std::vector<double> scores;                            // [T, E]
  std::vector<std::int32_t> experts;                     // [T, top_k], best first
  std::vector<double> weights;                           // [T, top_k]
  std::map<std::string, std::vector<double>> gradients;  // by checkpoint name below `model.layers.L.`
};

/// x and dy [T, D]; dy empty: forward only. `experts` [T, top_k]: the choice is given; empty: it is the router's, of
/// equal choices the lowest index.
FfnReferenceResult ffn_reference(const ModelConfig& config, const FfnReferenceWeights& weights,
                                 const std::vector<double>& x, const std::vector<double>& dy,
                                 const std::vector<std::int32_t>& experts = {});

}  // namespace isomer
