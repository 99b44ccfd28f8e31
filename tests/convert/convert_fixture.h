// Small MLA models on disk, and random text for them.
#pragma once

#include <nlohmann/json.hpp>

#include "convert/convert_tpla.h"
#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/temp_folder.h"
#include "tensor_values.h"

namespace isomer::testing {

struct SmallModel {
  bool q_lora = true;
  bool kv_norm = true;
  bool bias = false;
  int kv_lora_rank = 16;
  int layers = 2;
  int rope = 4;
};

inline nlohmann::json config_json(const SmallModel& model) {
  nlohmann::json json = {{"model_type", "deepseek_v3"},
                         {"vocab_size", 48},
                         {"hidden_size", 24},
                         {"intermediate_size", 20},
                         {"num_hidden_layers", model.layers},
                         {"num_attention_heads", 3},
                         {"num_key_value_heads", 3},
                         {"kv_lora_rank", model.kv_lora_rank},
                         {"qk_nope_head_dim", 6},
                         {"qk_rope_head_dim", model.rope},
                         {"v_head_dim", 8},
                         {"rms_norm_eps", 1e-5},
                         {"attention_bias", model.bias},
                         {"tie_word_embeddings", true},
                         {"max_position_embeddings", 64},
                         {"rope_theta", 10000.0},
                         {"kv_a_layernorm", model.kv_norm}};
  json["q_lora_rank"] = model.q_lora ? nlohmann::json(12) : nlohmann::json(nullptr);
  return json;
}

inline ModelConfig small_config(const SmallModel& model) { return parse_model_config(config_json(model), "small"); }

/// Weights of unit scale, norms and biases not what they start as.
inline ModelWeights small_weights(const ModelConfig& config, DType dtype, std::uint64_t seed = 3) {
  ModelWeights weights = initial_model_weights(config, seed, dtype, 0.3);
  std::uint64_t count = 0;
  weights.for_each([&](const std::string& name, Tensor& tensor) {
    ++count;
    const bool is_norm = name.ends_with("norm.weight"), is_bias = name.ends_with(".bias");
    if (!is_norm && !is_bias) return;
    set_values(tensor, noise_values(seed + 100 * count, tensor.numel(), 0.3, is_norm ? 1 : 0));
  });
  return weights;
}

/// config.json and weights in a new directory below `folder`.
inline std::filesystem::path write_small_model(const TempFolder& folder, const SmallModel& model, DType dtype) {
  const std::filesystem::path directory = folder.path() / "model";
  write_checkpoint(directory, model_tensor_sources(small_weights(small_config(model), dtype), dtype), 1 << 30);
  std::ofstream(directory / "config.json") << config_json(model).dump(2);
  std::ofstream(directory / "tokenizer_config.json") << "{}";
  return directory;
}

inline TokenDataset small_text(std::int64_t tokens = 400) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < tokens; ++i) {
    ids.push_back(static_cast<std::int32_t>((noise(9, static_cast<std::uint64_t>(i)) + 1.8) * 13));
  }
  const auto middle = ids.begin() + tokens / 3;
  return TokenDataset::from_tokens({{ids.begin(), middle}, {middle, ids.end()}}, 48);
}

inline TplaConversion small_conversion(const TempFolder& folder, const TplaOptions& options, int num_threads = 1) {
  return {.model = folder.path() / "model",
          .out = folder.path() / "out",
          .options = options,
          .calibration = {.tokens = 200, .window = 20, .held_out_windows = 2},
          .files = {{"text", 400, 7}},
          .num_threads = num_threads};
}

/// What `call` throws, as text; empty if nothing.
template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace isomer::testing
