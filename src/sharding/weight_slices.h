// Which part of each weight a rank of a tensor-parallel decode layout works with: a pure index map (design contract
// 11). Attention is cut by heads, an FFN (each expert's too) by its intermediate width, routed experts in groups as
// well; what makes the latent, norms, router, embedding and head stand whole on every rank.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "model/config.h"
#include "sharding/tokens.h"

namespace isomer {

struct WeightSlice {
  int axis = 0;
  IndexRange range;  // of that axis
};

/// How one rank's weights are cut.
struct WeightSplit {
  int head_parts = 1, head_part = 0;  // attention, by query heads
  bool split_kv_heads = true;         // grouped-query attention: only the KV heads of the rank's query heads, else all
  std::optional<HeadCut> heads;       // instead of those three, where parts may be uneven
  int ffn_parts = 1, ffn_part = 0;    // dense FFNs and shared experts, by intermediate width
  bool whole_shared_experts = false;  // of them, shared experts whole on every rank
  /// EP: routed experts stand in groups of neighbours, one group a part; inside a group their width is cut over
  /// ffn_parts / expert_parts ranks (TPF), the inner axis of ffn_part.
  int expert_parts = 1;

  int expert_width_parts() const { return ffn_parts / expert_parts; }
  int expert_part() const { return ffn_part / expert_width_parts(); }
};

/// Query heads of a rank; they divide by the parts (why_heads_unfit).
IndexRange query_heads_of(const ModelConfig& config, const WeightSplit& split);
/// KV heads that the rank's query heads use; ranks beyond their number share one (a copy each).
IndexRange kv_heads_of(const ModelConfig& config, const WeightSplit& split);
/// Heads of one of so many columns: grouped_heads of the model's.
HeadCut column_heads_of(const ModelConfig& config, int columns, int column);
/// Routed experts of a rank.
IndexRange experts_of(const ModelConfig& config, const WeightSplit& split);

/// The rank's part of a tensor of a layer, by the end of its name ("self_attn.q_b_proj.weight"); `rows` and `columns`
/// are the whole tensor's. Nullopt: the whole. An empty range: another rank's expert.
std::optional<WeightSlice> slice_of_weight(const ModelConfig& config, std::string_view name, std::int64_t rows,
                                           std::int64_t columns, const WeightSplit& split);

/// Why heads, KV heads, experts or an intermediate width can't be spread over so many ranks, with what would do; empty
/// if they can.
std::string why_heads_unfit(const ModelConfig& config, int num_ranks);
/// The same for columns that grouped_heads deals heads to, each over `slices` ranks with at least one head.
std::string why_columns_unfit(const ModelConfig& config, int slices, int columns);
std::string why_ffn_unfit(const ModelConfig& config, int tpf, int ep);

}  // namespace isomer
