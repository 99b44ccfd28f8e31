// What ffn.cpp puts between the norm and the residual: SwiGLU (ffn.cpp) and the mixture of experts (moe.cpp). T tokens,
// D hidden, F intermediate width, E experts.
#pragma once

#include <string_view>

#include "layers/ffn.h"

namespace isomer {

/// down(SiLU(gate·x) ∘ up·x), [T, D] workspace. Makes `gate` and `up` [T, F], saved. `prefix` goes before the names in
/// the records.
Tensor swiglu_forward(RankContext& ctx, std::string_view prefix, const MlpWeights& weights, const Tensor& x_norm,
                      Tensor& gate, Tensor& up);

struct SwigluBackward {
  Tensor x_norm;    // [T, D]
  Tensor gate, up;  // [T, F], destroyed
  Tensor dy;        // [T, D]
  Tensor dx_norm;   // [T, D] in the statistics' dtype, out
  bool accumulate;  // dx_norm is added to
};
void swiglu_backward(RankContext& ctx, std::string_view prefix, const MlpWeights& weights, SwigluBackward args,
                     MlpWeights& gradients);

/// Routed and shared experts: first (x, or undefined for 0) + Σ, [T, D] workspace. Of experts that stand on other ranks
/// the weights are undefined, and the sum lacks them (inference; there is no backward for it).
Tensor moe_forward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, const Tensor& first,
                   const RoutingSource& source, FfnSaved& saved);
/// dy [T, D] → dx_norm [T, D] (workspace, the statistics' dtype).
Tensor moe_backward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, FfnSaved&& saved, const Tensor& dy,
                    FfnGradients& gradients);

/// The gradient of the routing weights [T, top_k], through the router: its gate's, and dx_norm's part, added.
struct RouterBackward {
  Tensor x_norm;           // [T, D]
  Tensor scores;           // [T, E]
  const Routing* routing;  //
  Tensor dweights;         // [T, top_k]
  Tensor dscores;          // [T, E], optional
  Tensor dx_norm;          // [T, D], added to
};
void route_backward(RankContext& ctx, const ModelConfig& config, const MoeWeights& weights, RouterBackward args,
                    Tensor& dgate);
/// Weights [T, top_k] of a routing, workspace.
Tensor routing_weights(RankContext& ctx, const ModelConfig& config, const Tensor& scores, const Routing& routing);

}  // namespace isomer
