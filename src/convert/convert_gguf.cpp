#include "convert/convert_gguf.h"

#include <nlohmann/json.hpp>

#include "convert/staged_directory.h"
#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/inventory.h"
#include "model/tokenizer_trainer.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

/// In the order of the model; each is dequantised when its turn comes.
std::vector<TensorSource> sources_of(const Checkpoint& checkpoint, const ModelConfig& config, DType dtype) {
  std::vector<TensorSource> sources;
  for_each_expected_tensor(config, [&](const std::string& name, const Shape& shape, bool) {
    if (!checkpoint.contains(name)) return;  // an optional one: take_inventory has seen the others
    const DType type = name.ends_with("e_score_correction_bias") ? DType::f32 : dtype;
    sources.push_back({.name = name, .dtype = type, .shape = shape, .make = [&checkpoint, name, type] {
                         return checkpoint.read(name, type);
                       }});
  });
  return sources;
}

std::string config_text(const GgufConversion& conversion) {
  auto json = nlohmann::ordered_json::parse(load_model_config_text(conversion.model.string()));
  json["torch_dtype"] = conversion.dtype == DType::bf16 ? "bfloat16" : "float32";
  return json.dump(2) + "\n";
}

}  // namespace

void convert_gguf(const GgufConversion& conversion) {
  if (!is_gguf_file(conversion.model)) {
    invalid_argument("--model {}: expected a GGUF file", conversion.model.string());
  }
  StagedDirectory::refuse_existing(conversion.out);
  const Checkpoint checkpoint = Checkpoint::open(conversion.model);
  const ModelConfig config = load_model_config(conversion.model.string());
  if (const Inventory inventory = take_inventory(checkpoint, config); !inventory.problems.empty()) {
    throw Error(fmt::format("{}: {}; isomer inspect says all that is wrong", conversion.model.string(),
                            inventory.problems.front()));
  }
  StagedDirectory staged(conversion.out);
  write_checkpoint(staged.path(), sources_of(checkpoint, config, conversion.dtype), conversion.max_shard_bytes);
  write_text_atomically(staged.path() / "config.json", config_text(conversion));
  if (Tokenizer::is_at(conversion.model)) {
    const TokenizerTexts texts = Tokenizer::texts_at(conversion.model);
    save_tokenizer(staged.path(), Tokenizer::parse(texts.json, conversion.model.string(), texts.config_json),
                   texts.config_json);
  }
  staged.publish();
}

}  // namespace isomer
