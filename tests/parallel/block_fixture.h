// Small blocks for the scheme tests: odd sizes, every optional part, and real spread in the logits.
#pragma once

#include "study/compare.h"

namespace isomer::testing {

/// A block with `heads` heads whose dimensions are all different from each other.
inline ModelConfig small_config(std::int64_t heads, std::int64_t q_lora = 20, bool latent_norm = true) {
  ModelConfig c;
  c.name = "small";
  c.attention = AttentionKind::mla;
  c.hidden_size = 40;
  c.num_attention_heads = c.num_key_value_heads = heads;
  c.q_lora_rank = q_lora;
  c.kv_lora_rank = 24;
  c.qk_nope_head_dim = 12;
  c.qk_rope_head_dim = 8;
  c.v_head_dim = 14;  // wider than n
  c.kv_a_layernorm = latent_norm;
  c.num_hidden_layers = 1;
  c.vocab_size = 256;
  c.max_position_embeddings = 4096;
  return c;
}

inline BlockProblem small_problem(const ModelConfig& config, std::int64_t seq, DType dtype, AttentionCore core,
                                  std::int64_t batch = 2) {
  return {.config = config, .dtype = dtype, .seq = seq, .batch = batch, .first_position = 1000, .core = core};
}

inline BlockData seeded_data(const BlockProblem& p, std::uint64_t seed = 3) {
  const Shape shape{p.seq * p.batch, p.config.hidden_size};
  return {.weights = seeded_attention_weights(p.config, seed, p.dtype),
          .x = seeded_tensor(seed, "x", shape, p.dtype),
          .dy = seeded_tensor(seed, "dy", shape, p.dtype)};
}

inline CompareOptions compare_options(const BlockProblem& problem, int ranks, const std::string& layout) {
  CompareOptions options{.problem = problem};
  options.group.num_ranks = ranks;
  options.group.threads_per_rank = 1;
  options.group.timeout_s = 20;
  options.layouts = parse_layouts(layout);
  return options;
}

}  // namespace isomer::testing
