// A model's configuration: what Hugging Face's config.json says, under the field's names, with every derived size
// computed once and here.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace isomer {

enum class AttentionKind : std::uint8_t { mla, gqa };
enum class RopeScalingKind : std::uint8_t { none, linear, yarn, llama3, longrope };

/// Rotary embedding and its scaling (model-math: MLA, RoPE).
struct RopeConfig {
  double theta = 10000;
  bool interleave = true;  // adjacent pairs (2i, 2i+1), as DeepSeek; false: halves (i, i + r/2), as Llama, MiniCPM3
  bool rotate = true;      // false: the rope part exists and is not rotated (mla_use_nope)
  RopeScalingKind scaling = RopeScalingKind::none;
  double factor = 1;
  std::int64_t original_max_position_embeddings = 0;
  double beta_fast = 32, beta_slow = 1;              // yarn
  double mscale = 1, mscale_all_dim = 0;             // yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  std::vector<double> short_factor, long_factor;     // longrope
};

enum class RouterKind : std::uint8_t { softmax_greedy, softmax_group_limited, sigmoid_noaux_tc };

struct MoeConfig {
  std::int64_t n_routed_experts = 0;  // 0: a dense model
  std::int64_t num_experts_per_tok = 0;
  std::int64_t n_shared_experts = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t first_k_dense_replace = 0;
  std::int64_t n_group = 1, topk_group = 1;
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1;
  RouterKind router = RouterKind::softmax_greedy;
};

struct ModelConfig {
  std::string name;
  std::string model_type;  // as config.json has it
  AttentionKind attention = AttentionKind::mla;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;  // GQA; of an MLA config this is not the number of cached heads
  std::int64_t head_dim = 0;             // GQA
  // MLA
  std::int64_t q_lora_rank = 0;  // 0: absent, q_proj stands instead
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;  // may be 0
  std::int64_t v_head_dim = 0;
  bool kv_a_layernorm = true;  // absent in some converted checkpoints
  double rms_norm_eps = 1e-6;
  static constexpr double kInnerNormEps = 1e-6;  // the two inner norms, whatever rms_norm_eps says
  bool attention_bias = false;
  bool tie_word_embeddings = false;
  std::int64_t max_position_embeddings = 0;
  double scale_emb = 1, scale_depth = 0, dim_model_base = 0;  // MiniCPM3
  RopeConfig rope;
  MoeConfig moe;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }  // n + r
  std::int64_t latent_width() const { return kv_lora_rank + qk_rope_head_dim; }     // d + r, a cache row
  /// Width of a value, and so of a head's output: v, or head_dim for GQA.
  std::int64_t value_head_dim() const { return attention == AttentionKind::mla ? v_head_dim : head_dim; }
  /// Rotated elements of a query or key: r, or the whole head_dim for GQA.
  std::int64_t rope_dim() const { return attention == AttentionKind::mla ? qk_rope_head_dim : head_dim; }
  /// What a residual branch is multiplied by (MiniCPM3): scale_depth/√num_hidden_layers; 1 without scale_depth.
  double residual_scale() const {
    return scale_depth > 0 ? scale_depth / std::sqrt(static_cast<double>(num_hidden_layers)) : 1;
  }
  bool is_moe_layer(std::int64_t layer) const { return moe.n_routed_experts > 0 && layer >= moe.first_k_dense_replace; }
};

/// s: (n+r)^−½ · mscale(factor, mscale_all_dim)² where YaRN asks for it; head_dim^−½ for GQA.
double softmax_scale(const ModelConfig& config);

/// Parameters without a multi-token-prediction layer.
std::int64_t num_parameters(const ModelConfig& config);
/// Parameters of one layer's attention block (input norm included).
std::int64_t num_attention_parameters(const ModelConfig& config);
/// Cache elements of one token over all layers.
std::int64_t cache_elements_per_token(const ModelConfig& config);

/// Reads config.json text of the DeepSeek-V2, DeepSeek-V3, Kimi-K2, GLM, MiniCPM3 and Llama kinds. Throws isomer::Error
/// naming key, value and what was expected.
ModelConfig parse_model_config(const nlohmann::json& json, std::string_view name);

/// Names of the descriptions that ship in models/.
std::vector<std::string> builtin_model_names();

/// `name_or_path`: a built-in name, a directory with config.json, a JSON file, or a GGUF file. Unknown names suggest
/// near ones.
ModelConfig load_model_config(const std::string& name_or_path);
/// The text of that configuration, as it stands; of a GGUF file, the config.json that stands for it.
std::string load_model_config_text(const std::string& name_or_path);

}  // namespace isomer
