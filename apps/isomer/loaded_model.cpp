#include "apps/isomer/loaded_model.h"

#include <filesystem>

#include "apps/isomer/shipped_model.h"
#include "core/error.h"
#include "model/checkpoint.h"

namespace isomer {

namespace fs = std::filesystem;

FoundModel find_model(const std::string& model) {
  const std::string directory = shipped_model(model);
  std::error_code code;
  if (!fs::is_directory(directory, code)) {
    invalid_argument("--model {}: name a directory with config.json, model.safetensors and tokenizer.json{}", model,
                     fs::exists(directory, code) ? "" : "; a built-in description has no weights");
  }
  return {model, directory, load_model_config(directory)};
}

ModelWeights load_weights(const FoundModel& model, DType dtype) {
  return load_model_weights(Checkpoint::open(model.directory), model.config, dtype);
}

Tokenizer tokenizer_for(const FoundModel& model, const std::string& path) {
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
