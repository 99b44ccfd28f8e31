// The float64 reference of an attention block whatever its attention: mla_block.h or gqa_block.h behind one form, with
// weights by checkpoint name. What compare and the reference of whole models call.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/config.h"

namespace isomer {

/// As GqaReferenceInput (gqa_block.h), for either kind of attention.
struct AttentionReferenceInput {
  const std::map<std::string, std::vector<double>>& weights;  // by name below `model.layers.L.`
  std::int64_t seq = 0, batch = 1;
  std::int64_t first_position = 0;
  std::int64_t run_length = 0;
  const std::vector<double>& x;   // [seq, batch, D]
  const std::vector<double>& dy;  // [seq, batch, D]; empty: forward only
};

struct AttentionReferenceResult {
  std::vector<double> y;                                 // [seq, batch, D]
  std::vector<double> dx;                                // [seq, batch, D]; empty without dy
  std::map<std::string, std::vector<double>> gradients;  // by checkpoint name, of the weights that are there
};

/// Throws std::invalid_argument naming a weight that the configuration has no place for, or whose size does not fit.
AttentionReferenceResult attention_block_reference(const ModelConfig& config, const AttentionReferenceInput& input,
                                                   int num_threads);

}  // namespace isomer
