// A model with weights, as the subcommands that run one take it: --model DIR.
#pragma once

#include <string>

#include "model/config.h"
#include "model/model_weights.h"
#include "model/tokenizer.h"

namespace isomer {

struct LoadedModel {
  std::string name;       // as it was asked for
  std::string directory;  // where its files lie
  ModelConfig config;
  ModelWeights weights;
};

/// `model`: a directory with config.json and weights, a training run, or a built-in model that ships with weights.
/// Throws std::invalid_argument for anything else, isomer::Error for files that are wrong.
LoadedModel load_model(const std::string& model, DType dtype);

/// The tokenizer at `path`, or the model's own where that is empty. Throws std::invalid_argument where there is none,
/// and for one with more tokens than the model's vocabulary.
Tokenizer tokenizer_for(const LoadedModel& model, const std::string& path);

/// "f32" or "bf16".
DType parse_dtype(const std::string& text);

}  // namespace isomer
