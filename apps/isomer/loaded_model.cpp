#include "apps/isomer/loaded_model.h"

#include <filesystem>

#include "apps/isomer/shipped_model.h"
#include "core/error.h"
#include "model/checkpoint.h"

namespace isomer {

namespace fs = std::filesystem;

LoadedModel load_model(const std::string& model, DType dtype) {
  const std::string directory = shipped_model(model);
  std::error_code code;
  if (!fs::is_directory(directory, code)) {
    invalid_argument("--model {}: name a directory with config.json, model.safetensors and tokenizer.json{}", model,
                     fs::exists(directory, code) ? "" : "; a built-in description has no weights");
  }
  const Checkpoint checkpoint = Checkpoint::open(directory);
  ModelConfig config = load_model_config(directory);
  ModelWeights weights = load_model_weights(checkpoint, config, dtype);
  return {model, directory, std::move(config), std::move(weights)};
}

Tokenizer tokenizer_for(const LoadedModel& model, const std::string& path) {
  std::error_code code;
  if (path.empty() && !fs::is_regular_file(fs::path(model.directory) / "tokenizer.json", code)) {
    invalid_argument("--model {}: it has no tokenizer.json; name one with --tokenizer", model.name);
  }
  const std::string source = path.empty() ? model.directory : path;
  Tokenizer tokenizer = Tokenizer::load(source);
  if (tokenizer.vocab_size() > model.config.vocab_size) {
    invalid_argument("the tokenizer of {} has {} tokens, {} a vocabulary of {}: they don't belong together", source,
                     tokenizer.vocab_size(), model.name, model.config.vocab_size);
  }
  return tokenizer;
}

DType parse_dtype(const std::string& text) { return text == "bf16" ? DType::bf16 : DType::f32; }

}  // namespace isomer
