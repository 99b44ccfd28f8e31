// Which part of each weight a rank of a tensor-parallel decode layout works with: a pure index map (design contract
// 11). Attention is cut by heads, an FFN (each expert's too) by its intermediate width; what makes the latent, norms,
// router, embedding and head stand whole on every rank.
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

struct TensorParallel {
  int num_ranks = 1;
  int rank = 0;
  bool split_kv_heads = true;  // grouped-query attention: only the KV heads of the rank's query heads, else all
};

/// Query heads of a rank; they divide by the ranks (why_heads_unfit).
IndexRange query_heads_of(const ModelConfig& config, const TensorParallel& parallel);
/// KV heads that the rank's query heads use; ranks beyond their number share one (a copy each).
IndexRange kv_heads_of(const ModelConfig& config, const TensorParallel& parallel);

/// The rank's part of a tensor of a layer, by the end of its name ("self_attn.q_b_proj.weight"); `rows` and `columns`
/// are the whole tensor's. Nullopt: the whole.
std::optional<WeightSlice> slice_of_weight(const ModelConfig& config, std::string_view name, std::int64_t rows,
                                           std::int64_t columns, const TensorParallel& parallel);

/// Why heads, KV heads or an intermediate width can't be spread over so many ranks, with what would do; empty if they
/// can.
std::string why_heads_unfit(const ModelConfig& config, int num_ranks);

}  // namespace isomer
