#include "model/gguf/config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/gguf/dequantise.h"
#include "model/json_text.h"

namespace isomer {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMax = std::int64_t{1} << 32;
constexpr std::int64_t kMaxSize = 1 << 24;  // of a configuration (parse_model_config)

/// Metadata under the architecture's prefix.
class Keys {
 public:
  explicit Keys(const GgufFile& file)
      : file_(file), header_(file.header()), architecture_(header_.text("general.architecture")) {}

  const std::string& architecture() const { return architecture_; }
  const GgufFile& file() const { return file_; }
  const GgufHeader& header() const { return header_; }
  std::string key(std::string_view name) const { return fmt::format("{}.{}", architecture_, name); }
  bool has(std::string_view name) const { return header_.has(key(name)); }
  std::int64_t integer(std::string_view name) const { return header_.integer(key(name), 1, kMax); }
  /// A width, or a number of layers or heads.
  std::int64_t size(std::string_view name) const { return header_.integer(key(name), 1, kMaxSize); }
  std::int64_t integer_or(std::string_view name, std::int64_t absent) const {
    return header_.integer_or(key(name), 0, kMax, absent);
  }
  /// A number as it was written down before it became a float32: 1e-05, not 9.99999974737875e-06.
  double number_or(std::string_view name, double absent) const {
    if (!has(name)) return absent;
    const double value = header_.number(key(name));
    const bool is_float = static_cast<double>(static_cast<float>(value)) == value;
    return is_float ? std::stod(fmt::format("{}", static_cast<float>(value))) : value;
  }
  [[noreturn]] void wrong(std::string_view name, std::string_view what) const { header_.wrong(key(name), what); }

 private:
  const GgufFile& file_;
  const GgufHeader& header_;
  std::string architecture_;
};

const GgufTensor& tensor_of(const Keys& keys, std::string_view name) {
  const GgufTensor* tensor = keys.header().find(name);
  if (tensor == nullptr) throw Error(fmt::format("{}: tensor '{}' is missing", keys.header().source, name));
  return *tensor;
}

void add_sizes(const Keys& keys, Json& config) {
  const GgufTensor& embedding = tensor_of(keys, "token_embd.weight");
  const auto vocabulary = embedding.shape[0];
  if (keys.integer_or("vocab_size", vocabulary) != vocabulary) {
    keys.wrong("vocab_size", fmt::format("token_embd.weight has {} rows", vocabulary));
  }
  config["vocab_size"] = vocabulary;
  config["hidden_size"] = keys.size("embedding_length");
  config["intermediate_size"] = keys.size("feed_forward_length");
  config["num_hidden_layers"] = keys.size("block_count");
  config["num_attention_heads"] = keys.size("attention.head_count");
  config["max_position_embeddings"] = keys.integer("context_length");
  config["rms_norm_eps"] = keys.number_or("attention.layer_norm_rms_epsilon", 1e-6);
  config["hidden_act"] = "silu";
  config["tie_word_embeddings"] = keys.header().find("output.weight") == nullptr;
}

void add_token(const Keys& keys, const char* name, Json& config) {
  const auto key = fmt::format("tokenizer.ggml.{}", name);
  if (keys.header().has(key)) config[name] = keys.header().integer(key, 0, kMax);
}

/// Divisors of the frequencies, one a pair (Llama 3.1 in GGUF).
Json longrope_json(const Keys& keys, const GgufTensor& divisors) {
  std::vector<float> values(static_cast<std::size_t>(num_elements(divisors.shape)));
  if (divisors.shape.size() != 1) keys.wrong("rope.freq_base", "rope_freqs.weight has more than one axis");
  dequantise(divisors.type, keys.file().file().data() + divisors.begin, divisors.width(), values.data());
  Json list = Json::array();
  for (const float value : values) {
    if (!(value > 0) || !std::isfinite(value)) {
      throw Error(fmt::format("{}: at byte {}: tensor '{}' holds {}: expected positive divisors of frequencies",
                              keys.header().source, divisors.begin, divisors.name, value));
    }
    list.push_back(static_cast<double>(value));
  }
  return {{"rope_type", "longrope"},
          {"factor", 1.0},
          {"original_max_position_embeddings", keys.integer("context_length")},
          {"short_factor", list},
          {"long_factor", list}};
}

Json yarn_json(const Keys& keys) {
  Json scaling = {{"type", "yarn"},
                  {"factor", keys.number_or("rope.scaling.factor", 1)},
                  {"original_max_position_embeddings", keys.integer("rope.scaling.original_context_length")},
                  {"beta_fast", keys.number_or("rope.scaling.yarn_beta_fast", 32)},
                  {"beta_slow", keys.number_or("rope.scaling.yarn_beta_slow", 1)}};
  // DeepSeek's multiplier is 0.1·mscale_all_dim; all of its models have mscale = mscale_all_dim.
  if (keys.has("rope.scaling.yarn_log_multiplier")) {
    const double mscale = std::stod(fmt::format("{:.6g}", 10 * keys.number_or("rope.scaling.yarn_log_multiplier", 0)));
    scaling["mscale"] = mscale;
    scaling["mscale_all_dim"] = mscale;
  }
  return scaling;
}

Json scaling_json(const Keys& keys) {
  if (const GgufTensor* divisors = keys.header().find("rope_freqs.weight")) return longrope_json(keys, *divisors);
  if (keys.number_or("rope.scaling.attn_factor", 1) != 1) keys.wrong("rope.scaling.attn_factor", "expected 1, or none");
  const double old_linear = keys.number_or("rope.scale_linear", 1);  // of the first files
  if (old_linear != 1) return {{"type", "linear"}, {"factor", old_linear}};
  const std::string type = keys.header().text_or(keys.key("rope.scaling.type"), "none");
  if (type == "none") return nullptr;
  if (type == "linear") return {{"type", "linear"}, {"factor", keys.number_or("rope.scaling.factor", 1)}};
  if (type == "yarn") return yarn_json(keys);
  keys.wrong("rope.scaling.type", fmt::format("\"{}\": expected none, linear or yarn", printable(type)));
}

void add_rope(const Keys& keys, std::int64_t rotated, Json& config) {
  config["rope_theta"] = keys.number_or("rope.freq_base", 10000);
  config["rope_scaling"] = scaling_json(keys);
  const auto dims = keys.integer_or("rope.dimension_count", rotated);
  if (dims != rotated) keys.wrong("rope.dimension_count", fmt::format("{}: expected {}, all of them", dims, rotated));
}

Json llama_config(const Keys& keys) {
  Json config = {{"architectures", {"LlamaForCausalLM"}}, {"model_type", "llama"}};
  add_sizes(keys, config);
  if (keys.integer_or("expert_count", 0) > 0) keys.wrong("expert_count", "Llama with experts is not supported");
  const auto heads = keys.size("attention.head_count"), hidden = keys.size("embedding_length");
  if (!keys.has("attention.key_length") && hidden % heads != 0) {
    keys.wrong("embedding_length", fmt::format("{}: expected a multiple of the {} heads", hidden, heads));
  }
  const auto head_dim = keys.integer_or("attention.key_length", hidden / heads);
  if (keys.integer_or("attention.value_length", head_dim) != head_dim) {
    keys.wrong("attention.value_length", fmt::format("expected {}, that of the keys", head_dim));
  }
  config["num_key_value_heads"] = keys.integer_or("attention.head_count_kv", heads);
  config["head_dim"] = head_dim;
  config["attention_bias"] = keys.header().find("blk.0.attn_q.bias") != nullptr;
  config["mlp_bias"] = false;
  add_rope(keys, head_dim, config);
  return config;
}

void add_experts(const Keys& keys, bool sigmoid, Json& config) {
  const auto groups = keys.integer_or("expert_group_count", 1);
  config["first_k_dense_replace"] = keys.integer_or("leading_dense_block_count", 0);
  config["n_routed_experts"] = keys.integer("expert_count");
  config["num_experts_per_tok"] = keys.integer("expert_used_count");
  config["n_shared_experts"] = keys.integer_or("expert_shared_count", 0);
  config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length");
  config["moe_layer_freq"] = 1;
  config["n_group"] = groups;
  config["topk_group"] = keys.integer_or("expert_group_used_count", 1);
  config["norm_topk_prob"] = keys.header().flag_or(keys.key("expert_weights_norm"), false);
  config["routed_scaling_factor"] = keys.number_or("expert_weights_scale", 1);
  config["scoring_func"] = sigmoid ? "sigmoid" : "softmax";
  config["topk_method"] = sigmoid ? "noaux_tc" : groups > 1 ? "group_limited_greedy" : "greedy";
}

Json deepseek_config(const Keys& keys) {
  // 1: softmax, 2: sigmoid; the first files, of DeepSeek-V2, don't say.
  const auto gating = keys.integer_or("expert_gating_func", 1);
  if (gating != 1 && gating != 2) keys.wrong("expert_gating_func", fmt::format("{}: expected 1 or 2", gating));
  const bool sigmoid = gating == 2;
  Json config = {{"architectures", {sigmoid ? "DeepseekV3ForCausalLM" : "DeepseekV2ForCausalLM"}},
                 {"model_type", sigmoid ? "deepseek_v3" : "deepseek_v2"}};
  add_sizes(keys, config);
  // Files with k_b and v_b apart have the sizes of a cached row under the plain names.
  const auto head =
      keys.integer(keys.has("attention.key_length_mla") ? "attention.key_length_mla" : "attention.key_length");
  const auto value =
      keys.integer(keys.has("attention.value_length_mla") ? "attention.value_length_mla" : "attention.value_length");
  const auto rope = keys.integer_or("rope.dimension_count", 0);
  if (rope >= head) keys.wrong("rope.dimension_count", fmt::format("{}: a head has {} in all", rope, head));
  config["num_key_value_heads"] = keys.size("attention.head_count");
  if (keys.has("attention.q_lora_rank")) {
    config["q_lora_rank"] = keys.integer("attention.q_lora_rank");
  } else {
    config["q_lora_rank"] = nullptr;
  }
  config["kv_lora_rank"] = keys.integer("attention.kv_lora_rank");
  config["qk_nope_head_dim"] = head - rope;
  config["qk_rope_head_dim"] = rope;
  config["v_head_dim"] = value;
  config["attention_bias"] = false;
  if (keys.integer_or("expert_count", 0) > 0) add_experts(keys, sigmoid, config);
  add_rope(keys, rope, config);
  return config;
}

}  // namespace

std::string gguf_config_json(const GgufFile& file) {
  const Keys keys(file);
  const std::string& architecture = keys.architecture();
  if (architecture != "llama" && architecture != "deepseek2") {
    file.header().wrong("general.architecture",
                        fmt::format("\"{}\": expected llama or deepseek2", printable(architecture)));
  }
  Json config = architecture == "llama" ? llama_config(keys) : deepseek_config(keys);
  add_token(keys, "bos_token_id", config);
  add_token(keys, "eos_token_id", config);
  config["torch_dtype"] = "float32";
  return config.dump(2) + "\n";
}

}  // namespace isomer
