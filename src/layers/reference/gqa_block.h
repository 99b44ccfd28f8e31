// Float64 reference of one attention block with grouped-query attention on one rank, forward and backward: y = x + W_o
// · attention(GQA(RMSNorm(x))). Written from the equations alone and sharing nothing with the fast path but the RoPE
// table.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace isomer {

/// One weight that the block of a configuration may have: its checkpoint name (below `model.layers.L.`) and its shape;
/// a Linear is stored [out, in].
struct GqaReferenceWeight {
  std::string_view name;
  Shape shape;
  bool optional;
};
std::vector<GqaReferenceWeight> gqa_reference_weights(const ModelConfig& config);

/// What the block is given. Everything is sequence-major, token (i, b) in row i·batch + b.
struct GqaReferenceInput {
  const std::map<std::string, std::vector<double>>& weights;  // by name; rounded to the dtype under test and widened
  std::int64_t seq = 0, batch = 1;
  std::int64_t first_position = 0;  // positions are first_position, +1, … in every sequence
  std::int64_t run_length = 0;      // positions of the whole run, for longrope; 0: first_position + seq
  const std::vector<double>& x;     // [seq, batch, D]
  const std::vector<double>& dy;    // [seq, batch, D]; empty: forward only
};

struct GqaReferenceResult {
  std::vector<double> y;                                 // [seq, batch, D]
  std::vector<double> q;                                 // [seq, batch, h, head_dim], after RoPE
  std::vector<double> k;                                 // [seq, batch, n_kv, head_dim], after RoPE
  std::vector<double> v;                                 // [seq, batch, n_kv, head_dim]
  std::vector<double> attention;                         // [seq, batch, h·head_dim], before W_o
  std::vector<double> lse;                               // [seq, batch, h], natural logarithm
  std::vector<double> dx;                                // [seq, batch, D]; empty without dy
  std::map<std::string, std::vector<double>> gradients;  // by checkpoint name, of the weights that are there
};

/// The result does not depend on `num_threads`. Throws std::invalid_argument naming a weight or input whose size does
/// not fit the configuration.
GqaReferenceResult gqa_block_reference(const ModelConfig& config, const GqaReferenceInput& input, int num_threads);

}  // namespace isomer
