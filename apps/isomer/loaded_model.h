// A model with weights, as the subcommands that run one take it: --model DIR.
#pragma once

#include <memory>
#include <string>

#include "model/config.h"
#include "model/model_weights.h"
#include "model/tokenizer.h"
#include "parallel/decode/step_scheme.h"

namespace isomer {

struct FoundModel {
  std::string name;       // as it was asked for
  std::string directory;  // where its files lie; or its GGUF file
  ModelConfig config;
};

/// `model`: a directory with config.json and weights, a training run, a GGUF file, or a built-in model that ships with
/// weights. Throws std::invalid_argument for anything else, isomer::Error for files that are wrong.
FoundModel find_model(const std::string& model);

/// Throws isomer::Error for a checkpoint that is wrong.
ModelWeights load_weights(const FoundModel& model, DType dtype);

/// What a converted checkpoint's side file says; none where there is no tpla.json. Throws isomer::Error where it is
/// wrong.
std::shared_ptr<const TplaModel> find_tpla(const FoundModel& model);

/// A decode layout as it was asked for: `tpla` without g takes the side file's number of shards.
DecodeLayout layout_for(const std::string& asked, const ModelConfig& config, const TplaModel* tpla);

/// Whether a layout computes what one rank does; gla and tpla do where nothing is cut.
bool is_exact(const DecodeLayout& layout, const ModelConfig& config, const TplaModel* tpla);

/// The tokenizer at `path`, or the model's own where that is empty. Throws std::invalid_argument where there is none,
/// and for one with more tokens than the model's vocabulary.
Tokenizer tokenizer_for(const FoundModel& model, const std::string& path);

/// "f32" or "bf16".
DType parse_dtype(const std::string& text);

}  // namespace isomer
