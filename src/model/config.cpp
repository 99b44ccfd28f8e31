#include "model/config.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "model/config_reader.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxWidth = 1 << 24;  // hidden, intermediate, vocabulary
constexpr std::int64_t kMaxHeads = 1 << 16;
constexpr std::int64_t kMaxHeadDim = 1 << 16;
constexpr std::int64_t kMaxRank = 1 << 20;
constexpr std::int64_t kMaxLayers = 1 << 14;
constexpr double kMaxParameters = 1e15;  // far above any model, far below the end of int64

/// What a model_type settles beyond the keys of the file.
struct Family {
  std::string_view model_type;
  AttentionKind attention;
  bool interleave;      // rope on adjacent pairs unless the file says otherwise
  bool sigmoid_router;  // noaux_tc unless the file says otherwise
  bool tied;            // embeddings tied unless the file says otherwise
};
constexpr std::array kFamilies{
    Family{"deepseek_v2", AttentionKind::mla, true, false, false},
    Family{"deepseek_v3", AttentionKind::mla, true, true, false},
    Family{"deepseek_v32", AttentionKind::mla, true, true, false},
    Family{"kimi_k2", AttentionKind::mla, true, true, false},
    Family{"glm_moe_dsa", AttentionKind::mla, true, true, false},
    Family{"glm4_moe_lite", AttentionKind::mla, true, true, false},
    Family{"minicpm3", AttentionKind::mla, false, false, true},
    Family{"llama", AttentionKind::gqa, false, false, false},
    Family{"qwen2", AttentionKind::gqa, false, false, false},
};

const Family& family_of(const ConfigReader& reader) {
  const std::string model_type = reader.text("model_type");
  std::string known;
  for (const auto& family : kFamilies) {
    if (family.model_type == model_type) return family;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.model_type);
  }
  reader.wrong("model_type", "one of " + known);
}

void read_sizes(const ConfigReader& reader, const Family& family, ModelConfig& config) {
  config.vocab_size = reader.integer("vocab_size", 1, kMaxWidth);
  config.hidden_size = reader.integer("hidden_size", 1, kMaxWidth);
  config.intermediate_size = reader.integer("intermediate_size", 1, kMaxWidth);
  config.num_hidden_layers = reader.integer("num_hidden_layers", 1, kMaxLayers);
  config.num_attention_heads = reader.integer("num_attention_heads", 1, kMaxHeads);
  config.max_position_embeddings = reader.integer("max_position_embeddings", 1, std::int64_t{1} << 32);
  config.rms_norm_eps = reader.number_or("rms_norm_eps", 1e-30, 1, 1e-6);
  config.tie_word_embeddings = reader.boolean_or("tie_word_embeddings", family.tied);
  if (reader.text_or("hidden_act", "silu") != "silu") reader.wrong("hidden_act", "silu");
}

void read_mla(const ConfigReader& reader, ModelConfig& config) {
  config.q_lora_rank = reader.integer_or("q_lora_rank", 0, kMaxRank, 0);
  config.kv_lora_rank = reader.integer("kv_lora_rank", 1, kMaxRank);
  config.qk_nope_head_dim = reader.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  config.qk_rope_head_dim = reader.integer("qk_rope_head_dim", 0, kMaxHeadDim);
  if (config.qk_rope_head_dim % 2 != 0) reader.wrong("qk_rope_head_dim", "an even number: RoPE turns pairs");
  // MiniCPM3's file has no v_head_dim: its values are as wide as a plain head.
  const bool derived = config.model_type == "minicpm3" && !reader.has("v_head_dim");
  if (derived && config.hidden_size % config.num_attention_heads != 0) {
    reader.wrong("hidden_size", fmt::format("a multiple of num_attention_heads, {}", config.num_attention_heads));
  }
  config.v_head_dim =
      derived ? config.hidden_size / config.num_attention_heads : reader.integer("v_head_dim", 1, kMaxHeadDim);
  config.kv_a_layernorm = reader.boolean_or("kv_a_layernorm", true);
  config.attention_bias = reader.boolean_or("attention_bias", false);
  if (config.model_type == "minicpm3") {
    config.scale_emb = reader.number_or("scale_emb", 1e-6, 1e6, 1);
    config.scale_depth = reader.number_or("scale_depth", 0, 1e6, 0);
    config.dim_model_base = reader.number_or("dim_model_base", 0, 1e9, 0);
  }
}

void read_gqa(const ConfigReader& reader, ModelConfig& config) {
  const auto heads = config.num_attention_heads;
  config.num_key_value_heads = reader.integer_or("num_key_value_heads", 1, heads, heads);
  if (heads % config.num_key_value_heads != 0) {
    reader.wrong("num_key_value_heads", fmt::format("a divisor of num_attention_heads, {}", heads));
  }
  if (!reader.has("head_dim") && config.hidden_size % heads != 0) {
    reader.wrong("hidden_size", fmt::format("a multiple of num_attention_heads, {}, or head_dim present", heads));
  }
  config.head_dim = reader.integer_or("head_dim", 1, kMaxHeadDim, config.hidden_size / heads);
  if (config.head_dim % 2 != 0) {
    reader.wrong("head_dim", fmt::format("an even number: RoPE turns pairs; it is {}", config.head_dim));
  }
  config.attention_bias = config.model_type == "qwen2" || reader.boolean_or("attention_bias", false);
  if (reader.boolean_or("mlp_bias", false)) reader.wrong("mlp_bias", "false");
  if (reader.boolean_or("use_sliding_window", false)) reader.wrong("use_sliding_window", "false");
}

/// The formulas of the sizes, in int64 for the answer and in double to see first that the answer fits.
template <class T>
T mla_attention_parameters(const ModelConfig& c) {
  const T hidden = T(c.hidden_size), heads = T(c.num_attention_heads), latent = T(c.kv_lora_rank);
  const T q_rows = heads * T(c.qk_head_dim()), q_lora = T(c.q_lora_rank);
  const T q = c.q_lora_rank > 0 ? q_lora * hidden + q_lora + q_rows * q_lora : q_rows * hidden;
  const T kv_a = T(c.latent_width()) * hidden + (c.kv_a_layernorm ? latent : T(0));
  const T kv_b = heads * T(c.qk_nope_head_dim + c.v_head_dim) * latent;
  const T out = hidden * heads * T(c.v_head_dim);
  const T bias = c.attention_bias ? q_lora + T(c.latent_width()) + hidden : T(0);
  return hidden + q + kv_a + kv_b + out + bias;
}

template <class T>
T gqa_attention_parameters(const ModelConfig& c) {
  const T hidden = T(c.hidden_size);
  const T q_rows = T(c.num_attention_heads) * T(c.head_dim), kv_rows = T(c.num_key_value_heads) * T(c.head_dim);
  T bias = c.attention_bias ? q_rows + 2 * kv_rows : T(0);
  if (c.attention_bias && c.model_type != "qwen2") bias += hidden;  // Qwen2 has none on o_proj
  return hidden + 2 * q_rows * hidden + 2 * kv_rows * hidden + bias;
}

template <class T>
T attention_parameters(const ModelConfig& c) {
  return c.attention == AttentionKind::mla ? mla_attention_parameters<T>(c) : gqa_attention_parameters<T>(c);
}

template <class T>
T all_parameters(const ModelConfig& c) {
  const T hidden = T(c.hidden_size), layers = T(c.num_hidden_layers);
  const T moe_layers = c.moe.n_routed_experts > 0 ? T(c.num_hidden_layers - c.moe.first_k_dense_replace) : T(0);
  const T dense_mlp = 3 * hidden * T(c.intermediate_size);
  const T experts = T(c.moe.n_routed_experts), expert = 3 * hidden * T(c.moe.moe_intermediate_size);
  const T correction = c.moe.router == RouterKind::sigmoid_noaux_tc ? experts : T(0);
  const T moe_mlp = experts * hidden + correction + (experts + T(c.moe.n_shared_experts)) * expert;
  const T embeddings = T(c.vocab_size) * hidden * (c.tie_word_embeddings ? 1 : 2);
  const T per_layer = attention_parameters<T>(c) + hidden;  // with post_attention_layernorm
  return embeddings + hidden + layers * per_layer + (layers - moe_layers) * dense_mlp + moe_layers * moe_mlp;
}

double yarn_mscale(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * std::log(factor) + 1 : 1; }

}  // namespace

double softmax_scale(const ModelConfig& config) {
  if (config.attention == AttentionKind::gqa) return 1 / std::sqrt(static_cast<double>(config.head_dim));
  const double scale = 1 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  const RopeConfig& rope = config.rope;
  if (rope.scaling != RopeScalingKind::yarn || rope.mscale_all_dim == 0) return scale;
  const double mscale = yarn_mscale(rope.factor, rope.mscale_all_dim);
  return scale * mscale * mscale;
}

std::int64_t num_parameters(const ModelConfig& config) { return all_parameters<std::int64_t>(config); }

std::int64_t num_attention_parameters(const ModelConfig& config) { return attention_parameters<std::int64_t>(config); }

std::int64_t cache_elements_per_token(const ModelConfig& config) {
  const auto per_layer =
      config.attention == AttentionKind::mla ? config.latent_width() : 2 * config.num_key_value_heads * config.head_dim;
  return config.num_hidden_layers * per_layer;
}

ModelConfig parse_model_config(const nlohmann::json& json, std::string_view name) {
  const ConfigReader reader(json, std::string(name));
  const Family& family = family_of(reader);
  ModelConfig config;
  config.name = name;
  config.model_type = family.model_type;
  config.attention = family.attention;
  config.rope.interleave = family.interleave;
  read_sizes(reader, family, config);
  if (family.attention == AttentionKind::mla) {
    read_mla(reader, config);
    read_moe(reader, config, family.sigmoid_router);
  } else {
    read_gqa(reader, config);
  }
  read_rope(reader, config);
  if (const double count = all_parameters<double>(config); count > kMaxParameters) {
    throw Error(fmt::format("{}: the sizes together make {:.2g} parameters: expected at most {:g}", name, count,
                            kMaxParameters));
  }
  return config;
}

}  // namespace isomer
