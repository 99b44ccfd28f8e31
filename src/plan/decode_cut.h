// Shares of one layer's matrices that one device holds under a decode layout; weights and operations follow from them.
#pragma once

#include "cost/decode_layout.h"
#include "sharding/cache_shards.h"

namespace isomer {

/// Where shares are uneven, the first device's, which are the largest.
struct DecodeCut {
  std::int64_t query_heads = 0;   // that it projects
  std::int64_t absorb_heads = 0;  // MLA: through W_UK
  std::int64_t core_heads = 0;    // that attend
  std::int64_t value_heads = 0;   // MLA: through W_UV
  std::int64_t output_heads = 0;  // rows of W_o
  std::int64_t latent = 0;        // MLA: latent columns it attends over
  std::int64_t rope = 0;          // MLA: columns of k_pe it attends over
  std::int64_t latent_rows = 0;   // MLA: of W_kv_a, k_pe's included
  std::int64_t kv_heads = 0;      // GQA
  std::int64_t ffn_devices = 1;   // that share a dense FFN, or the shared experts
  bool shared_experts_whole = false;
};

inline DecodeCut decode_cut(const ModelConfig& c, const DecodeShards& s) {
  const std::int64_t h = c.num_attention_heads;
  const std::int64_t kv = c.attention == AttentionKind::mla ? h : c.num_key_value_heads;
  const std::int64_t column = grouped_heads(h, kv, s.tpa, 0).query.count;
  const std::int64_t own = balanced_part(column, s.kvp, 0).count;
  DecodeCut cut{column, column, column, own, own, c.kv_lora_rank, c.qk_rope_head_dim, c.latent_width()};
  cut.kv_heads = (c.num_key_value_heads + s.tpa - 1) / s.tpa;
  cut.ffn_devices = s.scheme == DecodeScheme::medha ? s.tpa : s.devices();
  cut.shared_experts_whole = s.data_parallel > 1 && s.ep > 1;
  switch (s.scheme) {
    case DecodeScheme::tp: break;
    case DecodeScheme::gla: cut.latent = c.kv_lora_rank / s.latent_shards; break;
    case DecodeScheme::tpla:
    case DecodeScheme::exact_latent: {
      const std::int64_t heads = h * s.latent_shards / s.tpa;
      cut.query_heads = cut.absorb_heads = cut.core_heads = cut.value_heads = heads;
      cut.output_heads = s.scatter_values ? own : heads;
      cut.latent = (c.kv_lora_rank - s.shared_columns) / s.latent_shards + s.shared_columns;
      if (!s.whole_rope) cut.rope = c.qk_rope_head_dim / s.latent_shards;
      break;
    }
    case DecodeScheme::kvp: cut.query_heads = cut.absorb_heads = own; break;
    case DecodeScheme::medha: cut.value_heads = cut.output_heads = column; break;
    case DecodeScheme::helix:
      if (s.gather_queries) cut.query_heads = own;
      if (s.gather_queries && s.absorb_before) cut.absorb_heads = own;
      if (s.values_before) cut.value_heads = column;
      break;
  }
  if (s.split_latent_rows) cut.latent_rows = cut.latent + c.qk_rope_head_dim;
  return cut;
}

/// Rows of a sequence of `length` tokens on the slice that has most of them: the first.
inline std::int64_t most_cached_rows(const DecodeShards& s, std::int64_t length) {
  return CacheShards{s.kvp, s.chunk}.count(0, length);
}

}  // namespace isomer
