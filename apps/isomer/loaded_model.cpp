#include "apps/isomer/loaded_model.h"

#include <filesystem>

#include "apps/isomer/shipped_model.h"
#include "apps/isomer/tokenizer_choice.h"
#include "convert/side_file.h"
#include "core/error.h"
#include "model/checkpoint.h"
#include "model/gguf.h"
#include "sharding/layout.h"

namespace isomer {

namespace fs = std::filesystem;

FoundModel find_model(const std::string& model) {
  const std::string directory = shipped_model(model);
  std::error_code code;
  if (!fs::is_directory(directory, code) && !is_gguf_file(directory)) {
    invalid_argument(
        "--model {}: name a directory with config.json, model.safetensors and tokenizer.json, or a GGUF "
        "file{}",
        model, fs::exists(directory, code) ? "" : "; a built-in description has no weights");
  }
  return {model, directory, load_model_config(directory)};
}

ModelWeights load_weights(const FoundModel& model, DType dtype) {
  return load_model_weights(Checkpoint::open(model.directory), model.config, dtype);
}

std::shared_ptr<const TplaModel> find_tpla(const FoundModel& model) {
  std::error_code code;
  if (!fs::exists(fs::path(model.directory) / "tpla.json", code)) return nullptr;
  TplaSideFile side = load_tpla_side_file(model.directory, model.config, Checkpoint::open(model.directory));
  return std::make_shared<const TplaModel>(TplaModel{side.options, std::move(side.layers)});
}

DecodeLayout layout_for(const std::string& asked, const ModelConfig& config, const TplaModel* tpla) {
  if (tpla == nullptr) return parse_decode_layout(asked, config);
  Layout layout = parse_layout(asked);
  LayoutAxis& attention = layout.axes.front();
  if (attention.name == "tpla" && attention.size <= 0) {
    attention.options.try_emplace("g", fmt::format("{}", tpla->options.num_shards));
  }
  return complete_layout(parse_decode_layout(to_string(layout), config), tpla);
}

bool is_exact(const DecodeLayout& layout, const ModelConfig& config, const TplaModel* tpla) {
  if (layout.shards.scheme != DecodeScheme::tpla || tpla == nullptr) {
    return layout.shards.is_exact() || layout.shards.latent_shards == 1;
  }
  const TplaOptions& o = tpla->options;
  return (o.num_shards == 1 && o.kappa == TplaKappa::one) || o.shared_columns == config.kv_lora_rank;
}

Tokenizer tokenizer_for(const FoundModel& model, const std::string& path) {
  Tokenizer tokenizer = choose_tokenizer(path, model.name, model.directory);
  if (tokenizer.vocab_size() > model.config.vocab_size) {
    invalid_argument("the tokenizer of {} has {} tokens, {} a vocabulary of {}: they don't belong together",
                     path.empty() ? model.directory : path, tokenizer.vocab_size(), model.name,
                     model.config.vocab_size);
  }
  return tokenizer;
}

DType parse_dtype(const std::string& text) { return text == "bf16" ? DType::bf16 : DType::f32; }

}  // namespace isomer
