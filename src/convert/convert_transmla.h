// A grouped-query model as one with latent attention: calibration, the steps of transmla.h with the loss of each,
// alignment if asked for, and a Hugging Face directory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "convert/align_blocks.h"
#include "convert/calibration.h"
#include "convert/compare_logits.h"
#include "convert/transmla.h"
#include "train/token_file.h"

namespace isomer {

struct TransMlaConversion {
  std::filesystem::path model;  // anything that holds a model
  std::filesystem::path out;    // a directory that doesn't exist yet
  TransMlaOptions options;
  CalibrationOptions calibration;
  BlockAlignOptions align;
  DType dtype = DType::f32;  // of the weights written
  int num_threads = 1;
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  ConversionProgress progress;
};

/// How far the model after a step lies from the original, on held-out text.
struct TransMlaReport {
  std::string step;
  std::int64_t cached = 0;  // elements a token and layer
  LogitDifference difference;
};

struct TransMlaResult {
  std::vector<TransMlaReport> steps;
  std::int64_t window = 0, calibration_tokens = 0;
  std::vector<AlignedBlock> aligned;  // by layer; empty without alignment
};

/// Throws std::invalid_argument for options that don't fit the model, for one with biases on its attention (the latent
/// layout has no place for those of q, k and v), and where something stands at `out`.
TransMlaResult convert_transmla(const TransMlaConversion& conversion, const TokenDataset& text);

}  // namespace isomer
