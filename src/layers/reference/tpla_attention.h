// Float64 reference of sharded latent attention in decode (model-math: TPLA; decode on rank i, all heads), written from
// the equations alone: plain loops, no shared code with the decode layouts that are held against it.
//
//   rank i has the columns S (shared) and C_i of c:   ĉ = c/RMS(c)·γ, the RMS exact or sqrt(a_i·‖c_S,c_i‖²/d + ε)
//   z(t) = s·( q̃_S·ĉ_S(t) + κ_i·q̃_i·ĉ_i(t) + q_pe·k_pe(t) ),   p = softmax(z)
//   out  = Σ_i W_UV[:, C_i]·Σ_t p_i(t)·ĉ_i(t)  +  W_UV[:, S]·Σ_t p_0(t)·ĉ_S(t)
//
// The grouped baseline (GLA) keeps the diagonal blocks: the heads of group i see shard i alone, with its own RMS.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/reference/mla_block.h"
#include "model/config.h"
#include "model/tpla.h"

namespace isomer {

struct TplaReferenceInput {
  const ModelConfig& config;
  const TplaOptions& options;        // g, m, exact or sliced RMS
  const TplaLayer& scalars;          // κ, a_i; GLA reads neither
  const std::vector<double>& kv_b;   // [h(n + v), d]
  const std::vector<double>& gamma;  // [d]; empty without kv_a_layernorm
  const std::vector<double>& q;      // [queries, h, n + r], rotated
  const std::vector<double>& c;      // [keys, d], before kv_a_layernorm
  const std::vector<double>& k_pe;   // [keys, r], rotated
  std::int64_t first_query = 0;      // query i sees keys 0 … first_query + i
  std::int64_t exact_keys = 0;       // leading keys that an exact prefill cached: their RMS is that of the whole row
  LatentSharding sharding = LatentSharding::tpla;
};

struct TplaReferenceResult {
  std::vector<double> attention;  // [queries, h, v], before W_o
  std::vector<double> logits;  // [g, h, queries, keys]; −inf beyond what a query sees, and, with GLA, of other groups
  std::vector<double> lse;     // [g, queries, h], natural logarithm
};

/// Throws std::invalid_argument for options that don't fit (check_tpla_options; GLA: heads that g does not divide,
/// shared columns) and for inputs of another size.
TplaReferenceResult tpla_attention_reference(const TplaReferenceInput& input);

/// The whole attention block of one sequence at positions 0, 1, …: y [seq, D] for x [seq, D]. Rows before
/// `first_sharded` are exact MLA (prefill), the others what decode gives token by token after it.
std::vector<double> tpla_block_reference(const ModelConfig& config, const MlaReferenceWeights& weights,
                                         const TplaOptions& options, const TplaLayer& scalars,
                                         const std::vector<double>& x, std::int64_t first_sharded,
                                         LatentSharding sharding, int num_threads);

}  // namespace isomer
