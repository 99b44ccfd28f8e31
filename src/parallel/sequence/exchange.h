// What crosses the wire in the sequence-parallel schemes: tokens for heads and back, rows gathered, sums scattered.
// Tensors are [rows, heads, width] or [rows, width]; "local" has the rank's tokens and all heads, "by heads" all tokens
// and the rank's heads. With one rank each is the identity and nothing is copied.
#pragma once

#include <string_view>

#include "core/rank_context.h"
#include "sharding/tokens.h"

namespace isomer {

/// [T, h, w] → [S·batch, h/P, w] (all-to-all).
Tensor tokens_to_heads(RankContext& ctx, const TokenShards& tokens, std::string_view name, const Tensor& local,
                       MemoryClass memory_class);
/// [S·batch, h/P, w] → [T, h, w] (all-to-all).
Tensor heads_to_tokens(RankContext& ctx, const TokenShards& tokens, std::string_view name, const Tensor& by_heads,
                       MemoryClass memory_class);
/// [T, w] → [S·batch, w] (all-gather).
Tensor gather_rows(RankContext& ctx, const TokenShards& tokens, std::string_view name, const Tensor& local,
                   MemoryClass memory_class);
/// [S·batch, w] partial sums of every rank → [T, w], the sum for the rank's tokens (reduce-scatter).
Tensor scatter_sum_rows(RankContext& ctx, const TokenShards& tokens, std::string_view name, const Tensor& partial);

}  // namespace isomer
