#include "sharding/weight_slices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "core/error.h"

namespace isomer {

namespace {

/// Rows (or columns) of heads, `width` a head.
WeightSlice by_heads(int axis, IndexRange heads, std::int64_t width) {
  return {axis, {heads.begin * width, heads.count * width}};
}

std::optional<WeightSlice> slice_of_attention(const ModelConfig& c, std::string_view slot, const WeightSplit& p) {
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

/// The routed expert that a weight belongs to: 3 of "model.layers.1.mlp.experts.3.up_proj.weight".
std::optional<std::int64_t> expert_of(std::string_view name) {
  constexpr std::string_view kKey = ".experts.";
  const std::size_t at = name.find(kKey);
  if (at == std::string_view::npos) return std::nullopt;
  std::int64_t expert = 0;
  const std::string_view digits = name.substr(at + kKey.size());
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), expert);
  ISOMER_CHECK(parsed.ec == std::errc(), "no expert's number in {}", name);
  return expert;
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

/// Query heads of the column that has least.
std::int64_t fewest_heads(const ModelConfig& c, int columns) {
  std::int64_t least = c.num_attention_heads;
  for (int column = 0; column < columns; ++column) {
    least = std::min(least, column_heads_of(c, columns, column).query.count);
  }
  return least;
}

/// "tpa=1 kvp≤16, tpa=2 kvp≤8, …": neighbours with the same most slices together, and at most 16 of them.
std::string fitting_columns(const ModelConfig& c) {
  constexpr std::size_t kMost = 16;
  std::vector<std::string> fitting;
  const auto heads = static_cast<int>(c.num_attention_heads);
  for (int first = 1, last = 1; first <= heads; first = last = last + 1) {
    if (fitting.size() == kMost) {
      fitting.emplace_back("…");
      break;
    }
    const std::int64_t most = fewest_heads(c, first);
    while (last < heads && fewest_heads(c, last + 1) == most) ++last;
    const std::string columns = first == last ? fmt::format("{}", first) : fmt::format("{} to {}", first, last);
    fitting.push_back(fmt::format("tpa={} kvp≤{}", columns, most));
  }
  return fmt::format("{}", fmt::join(fitting, ", "));
}

}  // namespace

IndexRange query_heads_of(const ModelConfig& config, const WeightSplit& p) {
  if (p.heads) return p.heads->query;
  return HeadShards{config.num_attention_heads, p.head_parts}.heads(p.head_part);
}

IndexRange kv_heads_of(const ModelConfig& config, const WeightSplit& p) {
  if (p.heads) return p.heads->kv;
  const std::int64_t heads = config.num_key_value_heads;
  if (heads % p.head_parts == 0) return HeadShards{heads, p.head_parts}.heads(p.head_part);
  return {p.head_part * heads / p.head_parts, 1};
}

HeadCut column_heads_of(const ModelConfig& c, int columns, int column) {
  const std::int64_t kv = c.attention == AttentionKind::gqa ? c.num_key_value_heads : c.num_attention_heads;
  return grouped_heads(c.num_attention_heads, kv, columns, column);
}

IndexRange experts_of(const ModelConfig& config, const WeightSplit& p) {
  return HeadShards{config.moe.n_routed_experts, p.expert_parts}.heads(p.expert_part());
}

std::optional<WeightSlice> slice_of_weight(const ModelConfig& config, std::string_view name, std::int64_t rows,
                                           std::int64_t columns, const WeightSplit& p) {
  const std::string_view slot = slot_of(name);
  if (name.find("self_attn.") != std::string_view::npos) {
    // The output's bias is added once, after the sum over ranks.
    if ((p.head_parts == 1 && !p.heads) || (name.ends_with(".bias") && slot == "o_proj")) return std::nullopt;
    return slice_of_attention(config, slot, p);
  }
  const bool by_rows = slot == "gate_proj" || slot == "up_proj";
  if (p.ffn_parts == 1 || (!by_rows && slot != "down_proj")) return std::nullopt;
  if (p.whole_shared_experts && name.find("shared_experts.") != std::string_view::npos) return std::nullopt;
  const std::int64_t width = by_rows ? rows : columns;
  const int axis = by_rows ? 0 : 1;
  const auto expert = expert_of(name);
  if (!expert) return WeightSlice{axis, balanced_part(width, p.ffn_parts, p.ffn_part)};
  const IndexRange own = experts_of(config, p);
  if (*expert < own.begin || *expert >= own.end()) return WeightSlice{axis, {0, 0}};
  return WeightSlice{axis, balanced_part(width, p.expert_width_parts(), p.ffn_part % p.expert_width_parts())};
}

std::string why_heads_unfit(const ModelConfig& c, int num_ranks) {
  if (!heads_fit(c, num_ranks)) {
    const std::string of_kv =
        c.attention == AttentionKind::gqa ? fmt::format(" with {} KV heads", c.num_key_value_heads) : "";
    return fmt::format("{} heads{} can't be spread over {} ranks; these numbers of ranks fit {}: {}",
                       c.num_attention_heads, of_kv, num_ranks, c.name, fmt::join(fitting_ranks(c), ", "));
  }
  return {};
}

std::string why_columns_unfit(const ModelConfig& c, int slices, int columns) {
  if (columns <= c.num_attention_heads && fewest_heads(c, columns) >= slices) return {};
  return fmt::format(
      "kvp={} slices of tpa={} columns are {} ranks, of which each needs a query head of its own, and {} has {} "
      "heads{}; these fit: {}",
      slices, columns, slices * columns, c.name, c.num_attention_heads,
      c.attention == AttentionKind::gqa ? fmt::format(" in {} KV groups", c.num_key_value_heads) : "",
      fitting_columns(c));
}

std::string why_ffn_unfit(const ModelConfig& c, int tpf, int ep) {
  const std::int64_t experts = c.moe.n_routed_experts;
  if (ep > 1 && experts == 0) return fmt::format("ep={}: {} has no experts to spread; leave ep out", ep, c.name);
  if (ep > 1 && experts % ep != 0) {
    return fmt::format("ep={}: {} experts can't be spread over {} groups; take a divisor of {}", ep, experts, ep,
                       experts);
  }
  const bool has_dense = experts == 0 || c.moe.first_k_dense_replace > 0;
  if (has_dense && c.intermediate_size < tpf * ep) {
    return fmt::format("an FFN of width {} can't be spread over {} ranks; take at most {}", c.intermediate_size,
                       tpf * ep, c.intermediate_size);
  }
  if (experts > 0 && c.moe.moe_intermediate_size < tpf) {
    return fmt::format("an FFN of width {} can't be spread over {} ranks; take at most {}", c.moe.moe_intermediate_size,
                       tpf, c.moe.moe_intermediate_size);
  }
  const std::int64_t shared = c.moe.n_shared_experts * c.moe.moe_intermediate_size;
  if (experts > 0 && shared > 0 && shared < tpf * ep) {
    return fmt::format("shared experts of width {} can't be spread over {} ranks; take at most {}", shared, tpf * ep,
                       shared);
  }
  return {};
}

}  // namespace isomer
