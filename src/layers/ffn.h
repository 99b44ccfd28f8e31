// The second half of a decoder layer on one rank's tokens, y = x + FFN(RMSNorm(x)): SwiGLU, or a mixture of experts
// with the routers of DeepSeek-V2 and V3. Every rank has all experts here; which tokens it has does not matter to it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/rank_context.h"
#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

/// Which experts a rank's tokens go to: host metadata, always real (design contract 3).
struct Routing {
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;
  std::vector<std::int32_t> experts;  // [num_tokens, top_k], best first
};

/// Where routing comes from. `computed` asks the router; the others give it beforehand, so that a dry run equals a real
/// run of the same routing, and runs can be compared step by step. Weights come from the router's scores always. A dry
/// run has no scores to choose by: there `computed` means `balanced`.
struct RoutingSource {
  enum class Kind : std::uint8_t {
    computed,
    replayed,
    balanced,  // token t's slot j goes to expert (t·top_k + j) mod E
    zipf,      // a token draws top_k different experts, the r-th most popular with weight r^−zipf_exponent
  };
  Kind kind = Kind::computed;
  const Routing* replay = nullptr;  // replayed: of this layer and these tokens
  std::uint64_t seed = 0;           // zipf
  double zipf_exponent = 1;
};

/// The routing that a source other than `computed` gives [num_tokens, top_k] over `num_experts`. Throws
/// std::invalid_argument for a replay of another shape.
Routing given_routing(const RoutingSource& source, std::int64_t num_tokens, std::int64_t top_k,
                      std::int64_t num_experts);

/// One layer's FFN: SwiGLU, or experts where layer.weights has a router (weights.is_moe()).
struct FfnLayer {
  const ModelConfig& config;
  const LayerWeights& weights;
};

struct FfnSaved {
  Tensor x;     // [T, D]; its norm is applied anew in the backward
  Tensor rstd;  // [T]
  // SwiGLU, and the shared experts of a MoE layer
  Tensor gate, up;  // [T, F]; the activation is computed anew
  // MoE
  Routing routing;
  Tensor scores;  // [T, E] float32 (float64 for float64): sigmoid, or softmax, of the router's logits
  Tensor
      dscores;  // [T, E], optional: set before the backward, a gradient by the scores from elsewhere (a balance loss)
  Tensor expert_gate, expert_up;               // [T·top_k, F_moe], rows sorted by expert
  Tensor expert_out;                           // [T·top_k, D], for the gradient of the routing weights
  std::vector<std::int64_t> expert_row_begin;  // [E + 1]
};

/// Under the weights' names, float32 (float64 for float64). Tensors that are defined are added to; the others are made.
struct FfnGradients {
  Tensor post_attention_layernorm;
  MlpWeights mlp;
  MoeWeights moe;  // e_score_correction_bias has none
};

/// x [T, D] → y [T, D] (workspace). Keeps x in `saved`. The branch counts config.residual_scale() times.
Tensor ffn_forward(RankContext& ctx, const FfnLayer& layer, const Tensor& x, const RoutingSource& routing,
                   FfnSaved& saved);
/// dy [T, D] → dx [T, D], and all gradients of this rank's tokens. An expert without tokens gets zeros. The routing
/// weights' gradient reaches the router's gate; the choice and the correction bias have none. Balance losses are the
/// trainer's: it may set saved.dscores.
Tensor ffn_backward(RankContext& ctx, const FfnLayer& layer, FfnSaved&& saved, Tensor dy, FfnGradients& gradients);

/// The router alone, for tests and for decoding: scores [T, E] (saved) of x·gateᵀ, in float32 whatever the dtype
/// (float64 for float64), the experts chosen (model-math: Router; of equal choices the lowest index wins) and their
/// weights [T, top_k] in the scores' dtype (workspace).
struct Routed {
  Tensor scores;
  Routing routing;
  Tensor weights;
};
Routed route(RankContext& ctx, const ModelConfig& config, const MoeWeights& weights, const Tensor& x_norm,
             const RoutingSource& source);

}  // namespace isomer
