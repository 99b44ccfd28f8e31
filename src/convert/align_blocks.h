// Layer-wise alignment: each attention block of a converted model is trained to give what the original's block gives on
// the original's own inputs. The training code's schemes and AdamW; norms, FFN, embedding and head stay as they are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "convert/calibration.h"
#include "convert/compare_logits.h"
#include "model/model_weights.h"

namespace isomer {

struct BlockAlignOptions {
  double minutes = 0;          // for all layers together; how many steps fit is measured on the first one
  std::int64_t steps = 0;      // a layer, instead of minutes: the same result whatever the machine's speed
  std::int64_t tokens = 8192;  // of the calibration text, at most
  double learning_rate = 1e-3;
};
/// Throws std::invalid_argument naming parameter and value.
void check_block_align_options(const BlockAlignOptions& options);

/// ‖block(x) − original block(x)‖² / ‖original block(x) − x‖², over all its tokens.
struct AlignedBlock {
  double error_before = 0, error_after = 0;
  std::int64_t steps = 0;
};

/// Replaces the attention weights of `converted`, whose configuration is `config`. All float32.
std::vector<AlignedBlock> align_blocks(const ModelRef& original, const ModelConfig& config, ModelWeights& converted,
                                       std::span<const Sample> samples, const BlockAlignOptions& options,
                                       int num_threads, const ConversionProgress& progress);

}  // namespace isomer
