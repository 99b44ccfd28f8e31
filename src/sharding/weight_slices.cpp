#include "sharding/weight_slices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace isomer {

namespace {

/// Rows (or columns) of heads, `width` a head.
WeightSlice by_heads(int axis, IndexRange heads, std::int64_t width) {
  return {axis, {heads.begin * width, heads.count * width}};
}

std::optional<WeightSlice> slice_of_attention(const ModelConfig& c, std::string_view slot, const TensorParallel& p) {
  const bool latent = c.attention == AttentionKind::mla;
  const IndexRange heads = query_heads_of(c, p);
  if (slot == "q_proj" || slot == "q_b_proj") return by_heads(0, heads, latent ? c.qk_head_dim() : c.head_dim);
  if (slot == "kv_b_proj") return by_heads(0, heads, c.qk_nope_head_dim + c.v_head_dim);
  if (slot == "o_proj") return by_heads(1, heads, c.value_head_dim());
  if ((slot == "k_proj" || slot == "v_proj") && p.split_kv_heads) return by_heads(0, kv_heads_of(c, p), c.head_dim);
  return std::nullopt;
}

/// The part of a name between its last dot but one and its last: "q_proj" of "self_attn.q_proj.weight".
std::string_view slot_of(std::string_view name) {
  name.remove_suffix(name.size() - std::min(name.size(), name.rfind('.')));
  return name.substr(name.rfind('.') + 1);
}

bool heads_fit(const ModelConfig& c, std::int64_t ranks) {
  const std::int64_t kv = c.attention == AttentionKind::gqa ? c.num_key_value_heads : ranks;
  return c.num_attention_heads % ranks == 0 && (kv % ranks == 0 || ranks % kv == 0);
}

std::vector<std::int64_t> fitting_ranks(const ModelConfig& c) {
  std::vector<std::int64_t> fitting;
  for (std::int64_t ranks = 1; ranks <= c.num_attention_heads; ++ranks) {
    if (heads_fit(c, ranks)) fitting.push_back(ranks);
  }
  return fitting;
}

}  // namespace

IndexRange query_heads_of(const ModelConfig& config, const TensorParallel& p) {
  return HeadShards{config.num_attention_heads, p.num_ranks}.heads(p.rank);
}

IndexRange kv_heads_of(const ModelConfig& config, const TensorParallel& p) {
  const std::int64_t heads = config.num_key_value_heads;
  if (heads % p.num_ranks == 0) return HeadShards{heads, p.num_ranks}.heads(p.rank);
  return {p.rank * heads / p.num_ranks, 1};
}

std::optional<WeightSlice> slice_of_weight(const ModelConfig& config, std::string_view name, std::int64_t rows,
                                           std::int64_t columns, const TensorParallel& p) {
  if (p.num_ranks == 1) return std::nullopt;
  const std::string_view slot = slot_of(name);
  const bool is_bias = name.ends_with(".bias");
  if (name.find("self_attn.") != std::string_view::npos) {
    // The output's bias is added once, after the sum over ranks.
    return is_bias && slot == "o_proj" ? std::nullopt : slice_of_attention(config, slot, p);
  }
  if (slot == "gate_proj" || slot == "up_proj") return WeightSlice{0, balanced_part(rows, p.num_ranks, p.rank)};
  if (slot == "down_proj") return WeightSlice{1, balanced_part(columns, p.num_ranks, p.rank)};
  return std::nullopt;
}

std::string why_heads_unfit(const ModelConfig& c, int num_ranks) {
  if (!heads_fit(c, num_ranks)) {
    const std::string of_kv =
        c.attention == AttentionKind::gqa ? fmt::format(" with {} KV heads", c.num_key_value_heads) : "";
    return fmt::format("{} heads{} can't be spread over {} ranks; these numbers of ranks fit {}: {}",
                       c.num_attention_heads, of_kv, num_ranks, c.name, fmt::join(fitting_ranks(c), ", "));
  }
  const bool sparse = c.moe.n_routed_experts > 0;
  const bool has_dense = !sparse || c.moe.first_k_dense_replace > 0;
  const std::int64_t narrowest =
      std::min(has_dense ? c.intermediate_size : num_ranks, sparse ? c.moe.moe_intermediate_size : num_ranks);
  if (narrowest < num_ranks) {
    return fmt::format("an FFN of width {} can't be spread over {} ranks; take at most {}", narrowest, num_ranks,
                       narrowest);
  }
  return {};
}

}  // namespace isomer
