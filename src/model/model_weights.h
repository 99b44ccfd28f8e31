// The weights of a whole decoder: embedding, layers (attention block, then SwiGLU or a mixture of experts), last norm,
// head. Names are those of a Hugging Face checkpoint (model-math: Checkpoints); a Linear is stored [out, in].
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weights.h"

namespace isomer {

/// SwiGLU: down(SiLU(gate·x) ∘ up·x); D hidden, F intermediate.
struct MlpWeights {
  Tensor gate_proj;  // [F, D]
  Tensor up_proj;    // [F, D]
  Tensor down_proj;  // [D, F]
};

/// E routed experts of F_moe, and the shared ones as one MLP of n_shared·F_moe (undefined without).
struct MoeWeights {
  Tensor gate;                     // [E, D], the router
  Tensor e_score_correction_bias;  // [E] float32; V3's router only. Not trained by gradients
  std::vector<MlpWeights> experts;
  MlpWeights shared_experts;
};

struct LayerWeights {
  AttentionWeights attention;
  Tensor post_attention_layernorm;  // [D]
  MlpWeights mlp;                   // a dense layer's; undefined in a MoE layer
  MoeWeights moe;                   // a MoE layer's

  bool is_moe() const { return moe.gate.defined(); }
};

struct ModelWeights {
  Tensor embed_tokens;  // [V, D]
  std::vector<LayerWeights> layers;
  Tensor norm;     // [D]
  Tensor lm_head;  // [V, D]; the same storage as embed_tokens where they are tied

  /// fn(name, tensor) for every defined tensor, under its name in a checkpoint; a tied head is not visited.
  template <class Fn>
  void for_each(Fn&& fn) {
    visit(*this, fn);
  }
  template <class Fn>
  void for_each(Fn&& fn) const {
    visit(*this, fn);
  }

 private:
  template <class Mlp, class Fn>
  static void visit_mlp(Mlp& mlp, const std::string& prefix, Fn&& fn) {
    if (mlp.gate_proj.defined()) fn(prefix + ".gate_proj.weight", mlp.gate_proj);
    if (mlp.up_proj.defined()) fn(prefix + ".up_proj.weight", mlp.up_proj);
    if (mlp.down_proj.defined()) fn(prefix + ".down_proj.weight", mlp.down_proj);
  }
  template <class Self, class Fn>
  static void visit(Self& w, Fn&& fn) {
    if (w.embed_tokens.defined()) fn(std::string("model.embed_tokens.weight"), w.embed_tokens);
    for (std::size_t l = 0; l < w.layers.size(); ++l) {
      auto& layer = w.layers[l];
      const std::string prefix = "model.layers." + std::to_string(l);
      layer.attention.for_each(
          [&](std::string_view name, auto& tensor) { fn(prefix + "." + std::string(name), tensor); });
      if (layer.post_attention_layernorm.defined()) {
        fn(prefix + ".post_attention_layernorm.weight", layer.post_attention_layernorm);
      }
      visit_mlp(layer.mlp, prefix + ".mlp", fn);
      if (layer.moe.gate.defined()) fn(prefix + ".mlp.gate.weight", layer.moe.gate);
      if (layer.moe.e_score_correction_bias.defined()) {
        fn(prefix + ".mlp.gate.e_score_correction_bias", layer.moe.e_score_correction_bias);
      }
      for (std::size_t e = 0; e < layer.moe.experts.size(); ++e) {
        visit_mlp(layer.moe.experts[e], prefix + ".mlp.experts." + std::to_string(e), fn);
      }
      visit_mlp(layer.moe.shared_experts, prefix + ".mlp.shared_experts", fn);
    }
    if (w.norm.defined()) fn(std::string("model.norm.weight"), w.norm);
    const bool tied = w.lm_head.same_view(w.embed_tokens);
    if (w.lm_head.defined() && !tied) fn(std::string("lm_head.weight"), w.lm_head);
  }
};

/// Every tensor that the configuration asks for (biases where `has_bias` says so), made by `make`; a tied head is the
/// embedding itself. The one place that knows which slots a model has.
ModelWeights make_model_weights(const ModelConfig& config,
                                const std::function<Tensor(const std::string& name, const Shape& shape)>& make);

/// A checkpoint's weights in `dtype` (the correction bias in float32), each tensor held against the configuration.
/// Where dtypes agree the tensors are read-only views of the file. Throws isomer::Error naming what is wrong.
ModelWeights load_model_weights(const Checkpoint& checkpoint, const ModelConfig& config, DType dtype);

/// Weights to start training from: N(0, stddev²) for matrices (those that write into the residual stream divided by
/// √(2·layers)), norms 1, biases 0. A value depends on (seed, tensor name, index) alone.
ModelWeights initial_model_weights(const ModelConfig& config, std::uint64_t seed, DType dtype, double stddev = 0.02,
                                   bool shape_only = false);

/// Sources for write_checkpoint, in the order of for_each, converted to `dtype` (the correction bias stays float32).
std::vector<TensorSource> model_tensor_sources(const ModelWeights& weights, DType dtype);

}  // namespace isomer
