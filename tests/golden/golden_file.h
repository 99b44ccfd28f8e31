// Reads the golden files beside it: a minimal safetensors reader (F64 only) and a ModelConfig made of the metadata,
// on purpose independent of src/model's readers.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/config.h"

namespace isomer::golden {

struct GoldenTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

struct GoldenFile {
  std::map<std::string, std::string> metadata;
  std::map<std::string, GoldenTensor> tensors;

  bool has(const std::string& name) const { return tensors.count(name) > 0; }
  /// Throws std::out_of_range for a name that is not there.
  const std::vector<double>& values(const std::string& name) const { return tensors.at(name).values; }
  nlohmann::json config_json() const { return nlohmann::json::parse(metadata.at("config")); }
  std::int64_t seq() const { return std::stoll(metadata.at("seq")); }
  std::int64_t batch() const { return std::stoll(metadata.at("batch")); }
  std::int64_t position_offset() const { return std::stoll(metadata.at("position_offset")); }
};

/// Reads tests/golden/<name>.safetensors.
inline GoldenFile read_golden_file(const std::string& name) {
  const std::string path = std::string(ISOMER_SOURCE_DIR) + "/tests/golden/" + name + ".safetensors";
  std::ifstream file(path, std::ios::binary);
  const std::string raw((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (raw.size() < 8) throw std::runtime_error("cannot read golden file " + path);
  std::uint64_t header_length = 0;
  std::memcpy(&header_length, raw.data(), 8);
  const auto header = nlohmann::json::parse(raw.substr(8, header_length));
  GoldenFile golden;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") {
      golden.metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    GoldenTensor& tensor = golden.tensors[key];
    tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
    const std::string bytes = raw.substr(8 + header_length + offsets[0], offsets[1] - offsets[0]);
    tensor.values.resize(bytes.size() / sizeof(double));
    std::memcpy(tensor.values.data(), bytes.data(), bytes.size());
  }
  return golden;
}

/// The value of `key`, or `otherwise` where it is absent or null.
template <class T>
T value_or(const nlohmann::json& json, const char* key, T otherwise) {
  const auto found = json.find(key);
  return found == json.end() || found->is_null() ? otherwise : found->template get<T>();
}

inline RopeConfig make_rope_config(const nlohmann::json& json) {
  RopeConfig rope;
  rope.theta = value_or(json, "rope_theta", rope.theta);
  rope.interleave = value_or(json, "rope_interleave", false);
  rope.rotate = !value_or(json, "mla_use_nope", false);
  const auto scaling = value_or(json, "rope_scaling", nlohmann::json::object());
  const auto type = value_or<std::string>(scaling, "type", "none");
  if (type == "linear") rope.scaling = RopeScalingKind::linear;
  if (type == "yarn") rope.scaling = RopeScalingKind::yarn;
  if (type == "llama3") rope.scaling = RopeScalingKind::llama3;
  if (type == "longrope") rope.scaling = RopeScalingKind::longrope;
  rope.original_max_position_embeddings = value_or<std::int64_t>(scaling, "original_max_position_embeddings", 0);
  rope.factor = value_or(scaling, "factor", 1.0);
  if (type == "longrope") {
    rope.factor =
        json.at("max_position_embeddings").get<double>() / static_cast<double>(rope.original_max_position_embeddings);
  }
  rope.beta_fast = value_or(scaling, "beta_fast", 32.0);
  rope.beta_slow = value_or(scaling, "beta_slow", 1.0);
  rope.mscale = value_or(scaling, "mscale", 1.0);
  rope.mscale_all_dim = value_or(scaling, "mscale_all_dim", 0.0);
  rope.low_freq_factor = value_or(scaling, "low_freq_factor", 1.0);
  rope.high_freq_factor = value_or(scaling, "high_freq_factor", 4.0);
  rope.short_factor = value_or(scaling, "short_factor", std::vector<double>{});
  rope.long_factor = value_or(scaling, "long_factor", std::vector<double>{});
  return rope;
}

inline MoeConfig make_moe_config(const nlohmann::json& json) {
  MoeConfig moe;
  const auto integer = [&](const char* key, std::int64_t otherwise) {
    return value_or<std::int64_t>(json, key, otherwise);
  };
  moe.n_routed_experts = integer("n_routed_experts", 0);
  if (moe.n_routed_experts == 0) return moe;
  moe.num_experts_per_tok = integer("num_experts_per_tok", 0);
  moe.n_shared_experts = integer("n_shared_experts", 0);
  moe.moe_intermediate_size = integer("moe_intermediate_size", 0);
  moe.first_k_dense_replace = integer("first_k_dense_replace", 0);
  moe.n_group = integer("n_group", 1);
  moe.topk_group = integer("topk_group", 1);
  moe.norm_topk_prob = json.at("norm_topk_prob").get<bool>();
  moe.routed_scaling_factor = json.at("routed_scaling_factor").get<double>();
  const auto method = json.at("topk_method").get<std::string>();
  moe.router = method == "noaux_tc" ? RouterKind::sigmoid_noaux_tc
               : method == "greedy" ? RouterKind::softmax_greedy
                                    : RouterKind::softmax_group_limited;
  return moe;
}

/// The file's configuration, of a block or of a model; an inner norm or a bias is there if its tensor is.
inline ModelConfig make_model_config(const GoldenFile& golden) {
  const nlohmann::json json = golden.config_json();
  const auto integer = [&](const char* key) { return value_or<std::int64_t>(json, key, 0); };
  const auto has = [&](const std::string& name) { return golden.has(name) || golden.has("model.layers.0." + name); };
  ModelConfig config;
  config.name = "golden";
  config.model_type = json.at("model_type").get<std::string>();
  config.attention = json.contains("kv_lora_rank") ? AttentionKind::mla : AttentionKind::gqa;
  config.vocab_size = integer("vocab_size");
  config.hidden_size = integer("hidden_size");
  config.intermediate_size = integer("intermediate_size");
  config.num_hidden_layers = integer("num_hidden_layers");
  config.num_attention_heads = integer("num_attention_heads");
  config.num_key_value_heads = integer("num_key_value_heads");
  config.head_dim = integer("head_dim");
  config.q_lora_rank = integer("q_lora_rank");
  config.kv_lora_rank = integer("kv_lora_rank");
  config.qk_nope_head_dim = integer("qk_nope_head_dim");
  config.qk_rope_head_dim = integer("qk_rope_head_dim");
  config.v_head_dim = integer("v_head_dim");
  config.kv_a_layernorm = has("self_attn.kv_a_layernorm.weight");
  config.rms_norm_eps = json.at("rms_norm_eps").get<double>();
  config.attention_bias = has("self_attn.o_proj.bias");
  config.max_position_embeddings = integer("max_position_embeddings");
  config.dim_model_base = value_or(json, "dim_model_base", 0.0);
  config.rope = make_rope_config(json);
  config.tie_word_embeddings = value_or(json, "tie_word_embeddings", false);
  config.moe = make_moe_config(json);
  return config;
}

}  // namespace isomer::golden
