// MLA checkpoint → the same model with a rotated latent, and the side file of its sharded decode (model-math: TPLA).
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "convert/align.h"
#include "convert/calibration.h"
#include "convert/side_file.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/tpla.h"
#include "train/token_file.h"

namespace isomer {

struct TplaConversion {
  std::filesystem::path model;  // directory with config.json and weights
  std::filesystem::path out;    // must not exist
  TplaOptions options;
  CalibrationOptions calibration;
  AlignmentOptions alignment = {};     // of kv_b, layer by layer; then whole attention is another function too
  std::vector<CalibrationFile> files;  // recorded as they are
  int num_threads = 1;
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  ConversionProgress progress = {};
};

struct TplaConversionResult {
  TplaSideFile side;
  CalibrationWindows windows;
  std::vector<AlignedLayer> aligned;  // by layer, without kv_b; empty without alignment
  std::int64_t dequantised = 0;       // FP8 tensors that became BF16
};

/// Names CalibrationFile of a path, reading it once.
CalibrationFile describe_calibration_file(const std::filesystem::path& path);

/// Writes `out`: the checkpoint (every tensor but the rewritten ones bit for bit, FP8 as BF16), config.json, the
/// tokenizer's files, tpla.json and tpla.safetensors. All of it is written into a directory beside `out` that is
/// renamed at the end, and removed if anything throws. The same bytes for the same seed, whatever the threads. Throws
/// std::invalid_argument for options that don't fit and an `out` that exists, isomer::Error for trouble with files.
TplaConversionResult convert_tpla(const TplaConversion& conversion, const TokenDataset& text);

}  // namespace isomer
