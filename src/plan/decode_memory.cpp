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

/// bfloat16 a token: hidden states in and out, projected and absorbed queries, outputs and values. Where the sequence
/// is cut, partial results with their float32 statistics: packed, and those of all slices (of a device's own heads; at
/// medha's root of all its column's).
double attention_workspace(const ModelConfig& c, const DecodeShards& s, const DecodeCut& cut) {
  const bool mla = c.attention == AttentionKind::mla;
  const double widest = mla ? real(cut.latent + cut.rope) : real(c.head_dim);
  const double projected = mla ? real(cut.query_heads * c.qk_head_dim() + c.q_lora_rank + 2 * cut.latent_rows)
                               : real((cut.query_heads + 2 * cut.kv_heads) * c.head_dim);
  const double values = mla ? real(cut.value_heads * c.v_head_dim) : 0;
  double bytes =
      2 * (4 * real(c.hidden_size) + projected + values + 2 * real(cut.core_heads) * widest) + 4 * real(cut.core_heads);
  if (s.kvp > 1) {
    const double slices = s.scheme == DecodeScheme::medha ? 1 + s.kvp : 2;
    bytes += real(cut.core_heads) * (slices * (2 * widest + 4) + 4 * s.kvp);
  }
  return bytes;
}

/// bfloat16 a token: its input, gate, up and their product, its output; of experts for as many of the token's as may
/// lie on one device, with a float32 sum.
double ffn_workspace(const ModelConfig& c, const DecodeShards& s, const DecodeCut& cut) {
  const auto mlp = [&](double width) { return 2 * (2 * real(c.hidden_size) + 3 * width); };
  const bool has_moe = c.moe.n_routed_experts > 0;
  const double dense =
      has_moe && c.moe.first_k_dense_replace == 0 ? 0 : mlp(real(c.intermediate_size) / real(cut.ffn_devices));
  if (!has_moe) return dense;
  const double width = real(c.moe.moe_intermediate_size);
  const double visits = real(std::min(c.moe.num_experts_per_tok, c.moe.n_routed_experts / s.ep));
  const double shared =
      mlp(width * real(c.moe.n_shared_experts) / (cut.shared_experts_whole ? 1 : real(cut.ffn_devices)));
  return std::max(dense,
                  visits * mlp(width / s.tpf) + shared + 4 * real(c.hidden_size) + 4 * real(c.moe.n_routed_experts));
}

/// `tokens`: of one group and one part of the batch.
double workspace_bytes(const DecodeProblem& problem, const DecodeLayout& layout, double tokens) {
  const ModelConfig& c = problem.config;
  const DecodeShards& s = layout.shards;
  const DecodeCut cut = decode_cut(c, s);
  double bytes = tokens * attention_workspace(c, s, cut) + tokens * s.data_parallel * ffn_workspace(c, s, cut) +
                 4 * tokens * real(c.vocab_size) / s.group();
  if (layout.pp > 1) bytes += 2 * 2 * tokens * layout.pp * real(c.hidden_size);  // of all parts, as they come and go
  // Logits over all that is cached in float32, the shares that come of others, and rounded for the product with the
  // latent.
  if (s.scheme == DecodeScheme::exact_latent) bytes += 10 * tokens * real(cut.core_heads) * real(problem.context);
  return bytes;
}

double router_weights(const MoeConfig& moe, std::int64_t hidden) {
  if (moe.n_routed_experts == 0) return 0;
  const bool biased = moe.router == RouterKind::sigmoid_noaux_tc;
  return real(moe.n_routed_experts * hidden) + (biased ? real(moe.n_routed_experts) : 0);
}

double moe_weights(const ModelConfig& c, const DecodeShards& s, const DecodeCut& cut) {
  const MoeConfig& moe = c.moe;
  if (moe.n_routed_experts == 0) return 0;
  const double routed = real(moe.n_routed_experts) / s.ep *
                        mlp_weights(c.hidden_size, balanced_part(moe.moe_intermediate_size, s.tpf, 0).count);
  const std::int64_t shared_width = moe.moe_intermediate_size * moe.n_shared_experts;
  const double shared =
      mlp_weights(c.hidden_size, balanced_part(shared_width, cut.shared_experts_whole ? 1 : cut.ffn_devices, 0).count);
  return real(c.hidden_size) + router_weights(moe, c.hidden_size) + routed + shared;
}

}  // namespace

DecodeWeights decode_weights(const ModelConfig& c, const DecodeShards& s) {
  const DecodeCut cut = decode_cut(c, s);
  const double vocabulary = real(c.vocab_size * c.hidden_size) / s.group();
  return {.attention = attention_weights(c, cut),
          .dense_ffn = real(c.hidden_size) +
                       mlp_weights(c.hidden_size, balanced_part(c.intermediate_size, cut.ffn_devices, 0).count),
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
  // A row's elements on the slice that has it, and the rows of the fullest.
  const double row = decode_cache_elements(c, s) * s.kvp;
  memory.cache = sequences * real(most_cached_rows(s, problem.context)) * row * real(layers.dense + layers.moe) *
                 bytes_of(problem.precision.cache);
  memory.workspace = workspace_bytes(problem, layout, tokens);
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
