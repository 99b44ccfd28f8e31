// The weights of one layer's attention block, latent or grouped-query, from a checkpoint or seeded (model-math:
// Checkpoints). model_weights.h has the whole model's.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/tensor.h"
#include "model/config.h"

namespace isomer {

class Checkpoint;

/// h heads, D hidden size, d kv_lora_rank, r qk_rope_head_dim, n qk_nope_head_dim, v v_head_dim. A Linear is stored
/// [out, in]. Undefined tensors are absent. MLA: either q_proj or the three of q_a stand; the rest of the optional ones
/// as the checkpoint has them. GQA (k KV heads of head_dim): q, k, v and o_proj, biases as the checkpoint has them.
struct AttentionWeights {
  Tensor input_layernorm;  // [D]
  Tensor q_proj;           // [h(n+r), D], absent where there is a q_lora_rank; GQA: [h·head_dim, D]
  Tensor q_bias;           // GQA: [h·head_dim]; optional
  Tensor k_proj;           // GQA: [k·head_dim, D]
  Tensor k_bias;           // GQA: [k·head_dim]; optional
  Tensor v_proj;           // GQA: [k·head_dim, D]
  Tensor v_bias;           // GQA: [k·head_dim]; optional
  Tensor q_a_proj;         // [q_lora, D]
  Tensor q_a_bias;         // [q_lora]; optional
  Tensor q_a_layernorm;    // [q_lora]
  Tensor q_b_proj;         // [h(n+r), q_lora]; per head n nope rows, then r rope rows
  Tensor kv_a_proj;        // [d+r, D]; latent rows, then the rope key
  Tensor kv_a_bias;        // [d+r]; optional
  Tensor kv_a_layernorm;   // [d]; optional
  Tensor kv_b_proj;        // [h(n+v), d]; per head n key rows, then v value rows
  Tensor o_proj;           // [D, h·v]; GQA: [D, h·head_dim]
  Tensor o_bias;           // [D]; optional

  /// fn(name, tensor) for every slot, defined or not; names as under "model.layers.L." of a checkpoint.
  template <class Fn>
  void for_each_slot(Fn&& fn) {
    visit(*this, fn);
  }
  /// fn(name, tensor) for the defined tensors.
  template <class Fn>
  void for_each(Fn&& fn) {
    visit(*this, [&](std::string_view name, Tensor& tensor) {
      if (tensor.defined()) fn(name, tensor);
    });
  }
  template <class Fn>
  void for_each(Fn&& fn) const {
    visit(*this, [&](std::string_view name, const Tensor& tensor) {
      if (tensor.defined()) fn(name, tensor);
    });
  }

 private:
  template <class Self, class Fn>
  static void visit(Self& w, Fn&& fn) {
    fn("input_layernorm.weight", w.input_layernorm);
    fn("self_attn.q_proj.weight", w.q_proj);
    fn("self_attn.q_proj.bias", w.q_bias);
    fn("self_attn.k_proj.weight", w.k_proj);
    fn("self_attn.k_proj.bias", w.k_bias);
    fn("self_attn.v_proj.weight", w.v_proj);
    fn("self_attn.v_proj.bias", w.v_bias);
    fn("self_attn.q_a_proj.weight", w.q_a_proj);
    fn("self_attn.q_a_proj.bias", w.q_a_bias);
    fn("self_attn.q_a_layernorm.weight", w.q_a_layernorm);
    fn("self_attn.q_b_proj.weight", w.q_b_proj);
    fn("self_attn.kv_a_proj_with_mqa.weight", w.kv_a_proj);
    fn("self_attn.kv_a_proj_with_mqa.bias", w.kv_a_bias);
    fn("self_attn.kv_a_layernorm.weight", w.kv_a_layernorm);
    fn("self_attn.kv_b_proj.weight", w.kv_b_proj);
    fn("self_attn.o_proj.weight", w.o_proj);
    fn("self_attn.o_proj.bias", w.o_bias);
  }
};

/// Shape of the tensor called `name` (as for_each gives it); empty where this configuration has no such tensor. Biases
/// have a shape where they may stand, whatever attention_bias says.
Shape attention_tensor_shape(const ModelConfig& config, std::string_view name);

/// Seeded weights N(0, 1/fan_in), norms 1 + 0.1·N(0, 1), biases 0.1·N(0, 1); q (or q_b) is scaled by 3/(s·√(n+r)), so
/// that logits have a standard deviation of about 3 for inputs of unit RMS. A value depends on (seed, tensor name,
/// index) alone. `shape_only` gives tensors without storage.
AttentionWeights seeded_attention_weights(const ModelConfig& config, std::uint64_t seed, DType dtype,
                                          bool shape_only = false, std::int64_t layer = 0);

/// One layer's attention block from a checkpoint, each tensor held against the configuration. Optional tensors are
/// taken as they stand in the file, but a kv_a_layernorm must stand exactly if config.kv_a_layernorm says so: without
/// it the model talks nonsense in silence. Where dtypes agree the tensors are read-only views of the file. Throws
/// isomer::Error naming tensor, shape and what was expected.
AttentionWeights load_attention_weights(const Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer,
                                        DType dtype);

/// Rows of model.embed_tokens: [num_tokens, hidden]; only these are read. Throws std::invalid_argument for an id
/// outside the vocabulary.
Tensor load_embedding_rows(const Checkpoint& checkpoint, const ModelConfig& config,
                           std::span<const std::int64_t> token_ids, DType dtype);

/// N(0, stddev²), named as in the memory record.
Tensor seeded_tensor(std::uint64_t seed, std::string_view name, Shape shape, DType dtype, double stddev = 1,
                     bool shape_only = false);

/// The seeded embedding of bytes: 256 rows of N(0, 1).
inline constexpr std::int64_t kByteVocabulary = 256;

/// Rows of the seeded byte embedding: [num_tokens, hidden]. Only these rows are generated. Throws
/// std::invalid_argument for an id outside [0, 256).
Tensor seeded_embedding_rows(std::uint64_t seed, std::span<const std::int64_t> token_ids, std::int64_t hidden,
                             DType dtype);

}  // namespace isomer
