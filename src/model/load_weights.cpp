#include "core/error.h"
#include "model/checkpoint.h"
#include "model/weights.h"

namespace isomer {

namespace {

bool is_optional(std::string_view name) { return name.ends_with(".bias"); }

void check_shape(const Checkpoint& checkpoint, const std::string& name, const Shape& expected) {
  const TensorInfo& info = checkpoint.info(name);
  if (info.shape == expected) return;
  throw Error(fmt::format("{}: at byte {}: tensor '{}' has shape {}: the configuration makes it {}",
                          checkpoint.file_of(name).string(), info.begin, name, to_string(info.shape),
                          to_string(expected)));
}

/// A tensor that the configuration has no place for would be ignored in silence.
void refuse_unexpected(const Checkpoint& checkpoint, const std::string& name, std::string_view slot) {
  if (!checkpoint.contains(name)) return;
  const std::string remedy = slot == "self_attn.kv_a_layernorm.weight"
                                 ? "the configuration says \"kv_a_layernorm\": false"
                                 : "the configuration (its kind of attention, its q_lora_rank) has no place for it";
  throw Error(fmt::format("{}: tensor '{}' is there and {}", checkpoint.file_of(name).string(), name, remedy));
}

[[noreturn]] void missing(const Checkpoint& checkpoint, const std::string& name, std::string_view slot) {
  const std::string remedy =
      slot == "self_attn.kv_a_layernorm.weight"
          ? "; if the model was converted without this norm, put \"kv_a_layernorm\": false into its config.json"
          : "";
  throw Error(fmt::format("{}: tensor '{}' is missing{}", checkpoint.path().string(), name, remedy));
}

}  // namespace

AttentionWeights load_attention_weights(const Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer,
                                        DType dtype) {
  if (layer < 0 || layer >= config.num_hidden_layers) {
    invalid_argument("layer {}: '{}' has layers 0 to {}", layer, config.name, config.num_hidden_layers - 1);
  }
  AttentionWeights weights;
  weights.for_each_slot([&](std::string_view slot, Tensor& tensor) {
    const auto name = fmt::format("model.layers.{}.{}", layer, slot);
    const Shape expected = attention_tensor_shape(config, slot);
    if (expected.empty()) return refuse_unexpected(checkpoint, name, slot);
    if (!checkpoint.contains(name)) {
      if (is_optional(slot)) return;
      missing(checkpoint, name, slot);
    }
    check_shape(checkpoint, name, expected);
    tensor = checkpoint.read(name, dtype);
  });
  return weights;
}

Tensor load_embedding_rows(const Checkpoint& checkpoint, const ModelConfig& config,
                           std::span<const std::int64_t> token_ids, DType dtype) {
  const std::string name = "model.embed_tokens.weight";
  check_shape(checkpoint, name, {config.vocab_size, config.hidden_size});
  for (const auto id : token_ids) {
    if (id < 0 || id >= config.vocab_size) {
      invalid_argument("token id {}: the vocabulary of '{}' has {}", id, config.name, config.vocab_size);
    }
  }
  return checkpoint.read_rows(name, token_ids, dtype);
}

}  // namespace isomer
