#include <algorithm>

#include "plan/decode_cut.h"
#include "plan/decode_operations.h"

namespace isomer {

namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

double attention_weights(const ModelConfig& c, const DecodeCut& cut) {
  const double D = real(c.hidden_size);
  if (c.attention == AttentionKind::gqa) {
    return D + D * real(c.head_dim) * real(cut.query_heads + 2 * cut.kv_heads + cut.output_heads);
  }
  const double q = real(cut.query_heads * c.qk_head_dim()), q_lora = real(c.q_lora_rank);
  double elements = D + real(cut.latent_rows) * D + (c.kv_a_layernorm ? real(c.kv_lora_rank) : 0);
  elements += c.q_lora_rank > 0 ? q_lora * D + q_lora + q * q_lora : q * D;
  elements += real(cut.absorb_heads * c.qk_nope_head_dim * cut.latent);
  elements += real(cut.value_heads * c.v_head_dim * cut.latent);
  return elements + real(cut.output_heads * c.v_head_dim) * D;
}

double mlp_weights(std::int64_t hidden, std::int64_t width) { return 3 * real(hidden) * real(width); }

double router_weights(const MoeConfig& moe, std::int64_t hidden) {
  if (moe.n_routed_experts == 0) return 0;
  const bool biased = moe.router == RouterKind::sigmoid_noaux_tc;
  return real(moe.n_routed_experts * hidden) + (biased ? real(moe.n_routed_experts) : 0);
}

double moe_weights(const ModelConfig& c, const DecodeShards& s, const DecodeCut& cut) {
  const MoeConfig& moe = c.moe;
  if (moe.n_routed_experts == 0) return 0;
  const double routed =
      real(moe.n_routed_experts) / s.ep * mlp_weights(c.hidden_size, moe.moe_intermediate_size) / s.tpf;
  const double shared = mlp_weights(c.hidden_size, moe.moe_intermediate_size * moe.n_shared_experts) /
                        (cut.shared_experts_whole ? 1 : real(cut.ffn_devices));
  return real(c.hidden_size) + router_weights(moe, c.hidden_size) + routed + shared;
}

}  // namespace

DecodeWeights decode_weights(const ModelConfig& c, const DecodeShards& s) {
  const DecodeCut cut = decode_cut(c, s);
  const double vocabulary = real(c.vocab_size * c.hidden_size) / s.group();
  return {.attention = attention_weights(c, cut),
          .dense_ffn = real(c.hidden_size) + mlp_weights(c.hidden_size, c.intermediate_size) / real(cut.ffn_devices),
          .moe_ffn = moe_weights(c, s, cut),
          .router = router_weights(c.moe, c.hidden_size),
          .embedding = vocabulary,
          .head = c.tie_word_embeddings ? 0 : vocabulary};
}

StageLayers stage_layers(const ModelConfig& c, int stages) {
  const std::int64_t moe_layers =
      c.moe.n_routed_experts > 0 ? std::max<std::int64_t>(0, c.num_hidden_layers - c.moe.first_k_dense_replace) : 0;
  const std::int64_t layers = (c.num_hidden_layers + stages - 1) / stages;
  const std::int64_t moe = std::min(layers, moe_layers);
  return {layers - moe, moe};
}

DecodeMemory decode_memory(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                           std::int64_t batch) {
  const ModelConfig& c = problem.config;
  const DecodeShards& s = layout.shards;
  const DecodeCut cut = decode_cut(c, s);
  const DecodeWeights w = decode_weights(c, s);
  const StageLayers layers = stage_layers(c, layout.pp);
  const double ends = layout.pp > 1 ? std::max(w.embedding, w.head) : w.embedding + w.head;
  const double sequences = real(batch) / s.data_parallel;  // of all parts that are under way
  const double tokens = sequences / layout.pp;             // of one part

  DecodeMemory memory;
  const Precision weights = problem.precision.weights;
  memory.weights = bytes_of(weights) * (real(layers.dense) * (w.attention + w.dense_ffn) +
                                        real(layers.moe) * (w.attention + w.moe_ffn - w.router) + ends) +
                   bytes_of(router_precision(weights)) * real(layers.moe) * w.router;
  memory.cache = sequences * real(problem.context) * decode_cache_elements(c, s) * real(layers.dense + layers.moe) *
                 bytes_of(problem.precision.cache);
  // Hidden states in and out, queries and outputs, gate, up and their product; bfloat16. Logits in float32.
  const double widest = c.attention == AttentionKind::mla ? real(cut.latent + c.qk_rope_head_dim) : real(c.head_dim);
  const double ffn_tokens = s.data_parallel > 1 && s.ep == 1 ? tokens * s.data_parallel : tokens;
  memory.workspace = 2 * (tokens * (4 * real(c.hidden_size) + 2 * real(cut.core_heads) * widest) +
                          ffn_tokens * (3 * real(c.intermediate_size) / real(cut.ffn_devices) + real(c.hidden_size))) +
                     4 * tokens * real(c.vocab_size) / s.group();
  if (s.scheme == DecodeScheme::exact_latent) {
    memory.workspace += 4 * tokens * real(cut.core_heads) * real(problem.context);
  }
  const double capacity = problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
  memory.reserved = problem.reserved_share * capacity;
  return memory;
}

Unfit why_batch_unfit(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                      std::int64_t batch) {
  if (batch % (static_cast<std::int64_t>(layout.shards.data_parallel) * layout.pp) != 0) return Unfit::batch;
  if (problem.context < layout.shards.kvp) return Unfit::context;
  const double capacity = problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
  return decode_memory(problem, hardware, layout, batch).total() > capacity ? Unfit::memory : Unfit::fits;
}

}  // namespace isomer
