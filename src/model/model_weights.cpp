#include "model/model_weights.h"

#include <cmath>

#include "core/huge_pages.h"
#include "model/checkpoint.h"
#include "model/random.h"

namespace isomer {

namespace {

using MakeTensor = std::function<Tensor(const std::string& name, const Shape& shape)>;

MlpWeights make_mlp(const std::string& prefix, std::int64_t hidden, std::int64_t width, const MakeTensor& make) {
  return {.gate_proj = make(prefix + ".gate_proj.weight", {width, hidden}),
          .up_proj = make(prefix + ".up_proj.weight", {width, hidden}),
          .down_proj = make(prefix + ".down_proj.weight", {hidden, width})};
}

MoeWeights make_moe(const ModelConfig& config, const std::string& prefix, const MakeTensor& make) {
  const MoeConfig& moe = config.moe;
  MoeWeights w;
  w.gate = make(prefix + ".gate.weight", {moe.n_routed_experts, config.hidden_size});
  if (moe.router == RouterKind::sigmoid_noaux_tc) {
    w.e_score_correction_bias = make(prefix + ".gate.e_score_correction_bias", {moe.n_routed_experts});
  }
  for (std::int64_t e = 0; e < moe.n_routed_experts; ++e) {
    w.experts.push_back(
        make_mlp(fmt::format("{}.experts.{}", prefix, e), config.hidden_size, moe.moe_intermediate_size, make));
  }
  if (moe.n_shared_experts > 0) {
    w.shared_experts = make_mlp(prefix + ".shared_experts", config.hidden_size,
                                moe.n_shared_experts * moe.moe_intermediate_size, make);
  }
  return w;
}

LayerWeights make_layer(const ModelConfig& config, std::int64_t index, const MakeTensor& make) {
  const auto prefix = fmt::format("model.layers.{}", index);
  LayerWeights layer;
  layer.attention.for_each_slot([&](std::string_view slot, Tensor& tensor) {
    const Shape shape = attention_tensor_shape(config, slot);
    if (!shape.empty()) tensor = make(fmt::format("{}.{}", prefix, slot), shape);
  });
  layer.post_attention_layernorm = make(prefix + ".post_attention_layernorm.weight", {config.hidden_size});
  if (config.is_moe_layer(index)) {
    layer.moe = make_moe(config, prefix + ".mlp", make);
  } else {
    layer.mlp = make_mlp(prefix + ".mlp", config.hidden_size, config.intermediate_size, make);
  }
  return layer;
}

/// Biases of attention exist as attention_bias says (Qwen2 has none on the output).
bool has_bias(const ModelConfig& config, std::string_view name) {
  const bool without_output_bias = config.model_type == "qwen2" && name.ends_with("o_proj.bias");
  return config.attention_bias && !without_output_bias;
}

bool is_norm(std::string_view name) { return name.ends_with("norm.weight"); }
bool is_correction_bias(std::string_view name) { return name.ends_with("e_score_correction_bias"); }
bool writes_residual(std::string_view name) {
  return name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
}

void check_shape(const Checkpoint& checkpoint, const std::string& name, const Shape& expected) {
  const TensorInfo& info = checkpoint.info(name);
  if (info.shape == expected) return;
  throw Error(fmt::format("{}: at byte {}: tensor '{}' has shape {}: the configuration makes it {}",
                          checkpoint.file_of(name).string(), info.begin, name, to_string(info.shape),
                          to_string(expected)));
}

}  // namespace

ModelWeights make_model_weights(const ModelConfig& config, const MakeTensor& make) {
  ModelWeights weights;
  weights.embed_tokens = make("model.embed_tokens.weight", {config.vocab_size, config.hidden_size});
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) weights.layers.push_back(make_layer(config, l, make));
  weights.norm = make("model.norm.weight", {config.hidden_size});
  weights.lm_head = config.tie_word_embeddings ? weights.embed_tokens
                                               : make("lm_head.weight", {config.vocab_size, config.hidden_size});
  return weights;
}

ModelWeights load_model_weights(const Checkpoint& checkpoint, const ModelConfig& config, DType dtype) {
  // The attention blocks have a loader of their own, which knows what may be absent.
  std::vector<AttentionWeights> attention;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    attention.push_back(load_attention_weights(checkpoint, config, l, dtype));
  }
  ModelWeights weights = make_model_weights(config, [&](const std::string& name, const Shape& shape) {
    if (name.find(".self_attn.") != std::string::npos || name.ends_with(".input_layernorm.weight")) return Tensor();
    if (!checkpoint.contains(name)) {
      throw Error(fmt::format("{}: tensor '{}' is missing", checkpoint.path().string(), name));
    }
    check_shape(checkpoint, name, shape);
    return checkpoint.read(name, is_correction_bias(name) && dtype == DType::bf16 ? DType::f32 : dtype);
  });
  for (std::size_t l = 0; l < attention.size(); ++l) weights.layers[l].attention = std::move(attention[l]);
  std::vector<Tensor> tensors;
  weights.for_each([&](const std::string&, const Tensor& tensor) { tensors.push_back(tensor); });
  collapse_into_huge_pages(tensors);
  return weights;
}

ModelWeights initial_model_weights(const ModelConfig& config, std::uint64_t seed, DType dtype, double stddev,
                                   bool shape_only) {
  const double residual = stddev / std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
  return make_model_weights(config, [&](const std::string& name, const Shape& shape) {
    if (name.ends_with(".bias") && !has_bias(config, name)) return Tensor();
    const DType type = is_correction_bias(name) && dtype == DType::bf16 ? DType::f32 : dtype;
    Tensor tensor = Tensor::unrecorded(name, type, shape, shape_only);
    NormalDistribution values{.mean = 0, .stddev = writes_residual(name) ? residual : stddev};
    if (is_norm(name)) values = {.mean = 1, .stddev = 0};
    if (name.ends_with("bias")) values = {.mean = 0, .stddev = 0};
    fill_seeded(seed, name, values, tensor);
    return tensor;
  });
}

std::vector<TensorSource> model_tensor_sources(const ModelWeights& weights, DType dtype) {
  std::vector<TensorSource> sources;
  weights.for_each([&](const std::string& name, const Tensor& tensor) {
    TensorSource source = tensor_source(name, tensor);
    source.dtype = is_correction_bias(name) ? DType::f32 : dtype;
    if (source.dtype != tensor.dtype()) {
      source.make = [tensor, type = source.dtype] {
        Tensor converted = Tensor::unrecorded("converted", type, tensor.shape());
        visit_dtype(tensor.dtype(), [&]<class From>() {
          visit_dtype(type, [&]<class To>() {
            const From* from = tensor.data<From>();
            To* to = converted.data<To>();
            for (std::int64_t i = 0; i < tensor.numel(); ++i) to[i] = static_cast<To>(from[i]);
          });
        });
        return converted;
      };
    }
    sources.push_back(std::move(source));
  });
  return sources;
}

}  // namespace isomer
