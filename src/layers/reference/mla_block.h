// Float64 reference of one attention block with MLA on one rank, forward and backward: y = x + W_o · attention(MLA(
// RMSNorm(x))). Written from the equations alone and sharing nothing with the fast path but the RoPE table.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace isomer {

/// Weights as the checkpoint has them, a Linear stored [out, in]. The caller rounds them to the dtype under test and
/// widens them again, so that the reference sees what the fast path sees. Empty: absent.
struct MlaReferenceWeights {
  std::vector<double> input_layernorm;     // [D]
  std::vector<double> q_proj;              // [h(n + r), D], where there is no q_lora_rank
  std::vector<double> q_a_proj;            // [q_lora, D]
  std::vector<double> q_a_layernorm;       // [q_lora]
  std::vector<double> q_b_proj;            // [h(n + r), q_lora]
  std::vector<double> kv_a_proj_with_mqa;  // [d + r, D]
  std::vector<double> kv_a_layernorm;      // [d]; optional
  std::vector<double> kv_b_proj;           // [h(n + v), d]
  std::vector<double> o_proj;              // [D, h·v]
  std::vector<double> q_a_proj_bias;       // [q_lora]; optional, like the others
  std::vector<double> kv_a_proj_bias;      // [d + r]
  std::vector<double> o_proj_bias;         // [D]
};

/// One weight of the block: its checkpoint name (below `model.layers.L.`), its member and its shape.
struct MlaReferenceWeight {
  std::string_view name;
  std::vector<double> MlaReferenceWeights::*member;
  Shape shape;
  bool optional;
};
/// All weights that the block of this configuration may have, in checkpoint order.
std::vector<MlaReferenceWeight> mla_reference_weights(const ModelConfig& config);

/// Everything is sequence-major, token (i, b) in row i·batch + b.
struct MlaReferenceResult {
  std::vector<double> y;                                 // [seq, batch, D]
  std::vector<double> q;                                 // [seq, batch, h, n + r], after RoPE
  std::vector<double> latent;                            // [seq, batch, d + r], the cache row [ĉ | RoPE(k_pe)]
  std::vector<double> attention;                         // [seq, batch, h·v], before W_o
  std::vector<double> lse;                               // [seq, batch, h], natural logarithm
  std::vector<double> dx;                                // [seq, batch, D]; empty without dy
  std::map<std::string, std::vector<double>> gradients;  // by checkpoint name, of the weights that are there
};

/// `x` and `dy` [seq, batch, D]; `dy` empty: forward only. Positions are first_position, +1, … in every sequence; the
/// run's length, which longrope looks at, is run_length, or first_position + seq where that is 0. The result does not
/// depend on `num_threads`. Memory: weights, gradients and whole activations, scores for 128 queries of one head a
/// thread. The branch counts config.residual_scale() times. Throws std::invalid_argument naming a weight or input whose
/// size does not fit the configuration.
MlaReferenceResult mla_block_reference(const ModelConfig& config, const MlaReferenceWeights& weights, std::int64_t seq,
                                       std::int64_t batch, std::int64_t first_position, const std::vector<double>& x,
                                       const std::vector<double>& dy, int num_threads, std::int64_t run_length = 0);

}  // namespace isomer
