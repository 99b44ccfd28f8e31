#include <cmath>

#include "model/random.h"
#include "model/weights.h"

namespace isomer {

namespace {

constexpr double kLogitDeviation = 3;
constexpr double kNormDeviation = 0.1;
constexpr double kBiasDeviation = 0.1;

bool is_present(const ModelConfig& config, std::string_view name) {
  if (attention_tensor_shape(config, name).empty()) return false;
  if (!name.ends_with(".bias")) return true;
  const bool without_output_bias = config.model_type == "qwen2" && name == "self_attn.o_proj.bias";
  return config.attention_bias && !without_output_bias;
}

NormalDistribution distribution_of(const ModelConfig& config, std::string_view name, const Shape& shape) {
  if (name.ends_with("layernorm.weight")) return {.mean = 1, .stddev = kNormDeviation};
  if (name.ends_with(".bias")) return {.mean = 0, .stddev = kBiasDeviation};
  const double stddev = 1 / std::sqrt(static_cast<double>(shape[1]));
  const bool makes_queries = name == "self_attn.q_proj.weight" || name == "self_attn.q_b_proj.weight";
  if (!makes_queries) return {.mean = 0, .stddev = stddev};
  const bool latent = config.attention == AttentionKind::mla;
  const double width = std::sqrt(static_cast<double>(latent ? config.qk_head_dim() : config.head_dim));
  return {.mean = 0, .stddev = stddev * kLogitDeviation / (softmax_scale(config) * width)};
}

}  // namespace

namespace {

Shape gqa_tensor_shape(const ModelConfig& c, std::string_view name) {
  const auto q_rows = c.num_attention_heads * c.head_dim, kv_rows = c.num_key_value_heads * c.head_dim;
  if (name == "input_layernorm.weight" || name == "self_attn.o_proj.bias") return {c.hidden_size};
  if (name == "self_attn.q_proj.weight") return {q_rows, c.hidden_size};
  if (name == "self_attn.q_proj.bias") return {q_rows};
  if (name == "self_attn.k_proj.weight" || name == "self_attn.v_proj.weight") return {kv_rows, c.hidden_size};
  if (name == "self_attn.k_proj.bias" || name == "self_attn.v_proj.bias") return {kv_rows};
  if (name == "self_attn.o_proj.weight") return {c.hidden_size, q_rows};
  return {};
}

}  // namespace

Shape attention_tensor_shape(const ModelConfig& c, std::string_view name) {
  if (c.attention == AttentionKind::gqa) return gqa_tensor_shape(c, name);
  const auto heads = c.num_attention_heads, hidden = c.hidden_size, q_lora = c.q_lora_rank;
  const auto q_rows = heads * c.qk_head_dim();
  const bool lora = q_lora > 0;
  if (name == "input_layernorm.weight" || name == "self_attn.o_proj.bias") return {hidden};
  if (name == "self_attn.q_proj.weight") return lora ? Shape{} : Shape{q_rows, hidden};
  if (name == "self_attn.q_a_proj.weight") return lora ? Shape{q_lora, hidden} : Shape{};
  if (name == "self_attn.q_a_proj.bias") return lora ? Shape{q_lora} : Shape{};
  if (name == "self_attn.q_a_layernorm.weight") return lora ? Shape{q_lora} : Shape{};
  if (name == "self_attn.q_b_proj.weight") return lora ? Shape{q_rows, q_lora} : Shape{};
  if (name == "self_attn.kv_a_proj_with_mqa.weight") return {c.latent_width(), hidden};
  if (name == "self_attn.kv_a_proj_with_mqa.bias") return {c.latent_width()};
  if (name == "self_attn.kv_a_layernorm.weight") return c.kv_a_layernorm ? Shape{c.kv_lora_rank} : Shape{};
  if (name == "self_attn.kv_b_proj.weight") return {heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank};
  if (name == "self_attn.o_proj.weight") return {hidden, heads * c.v_head_dim};
  return {};
}

AttentionWeights seeded_attention_weights(const ModelConfig& config, std::uint64_t seed, DType dtype, bool shape_only,
                                          std::int64_t layer) {
  AttentionWeights weights;
  weights.for_each_slot([&](std::string_view name, Tensor& tensor) {
    if (!is_present(config, name)) return;
    const Shape shape = attention_tensor_shape(config, name);
    const auto full_name = fmt::format("model.layers.{}.{}", layer, name);
    tensor = Tensor::unrecorded(full_name, dtype, shape, shape_only);
    fill_seeded(seed, full_name, distribution_of(config, name, shape), tensor);
  });
  return weights;
}

Tensor seeded_tensor(std::uint64_t seed, std::string_view name, Shape shape, DType dtype, double stddev,
                     bool shape_only) {
  Tensor tensor = Tensor::unrecorded(name, dtype, std::move(shape), shape_only);
  fill_seeded(seed, name, {.mean = 0, .stddev = stddev}, tensor);
  return tensor;
}

Tensor seeded_embedding_rows(std::uint64_t seed, std::span<const std::int64_t> token_ids, std::int64_t hidden,
                             DType dtype) {
  constexpr auto kName = "model.embed_tokens.weight";
  Tensor rows = Tensor::unrecorded(kName, dtype, {static_cast<std::int64_t>(token_ids.size()), hidden});
  auto* out = static_cast<char*>(rows.raw());
  for (const auto id : token_ids) {
    if (id < 0 || id >= kByteVocabulary) {
      invalid_argument("token id {}: expected a byte, 0 to {}", id, kByteVocabulary - 1);
    }
    fill_seeded(seed, kName, id * hidden, hidden, {}, dtype, out);
    out += hidden * size_of(dtype);
  }
  return rows;
}

}  // namespace isomer
