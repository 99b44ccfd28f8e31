// KV heads of grouped-query attention, spread over the inner ranks. With h query heads, k KV heads and P ranks that
// divide h, k' = lcm(k, P) KV heads travel (sharding/tokens.h: KvHeadShards), each of the k standing k'/k times.
#pragma once

#include <string_view>

#include "parallel/sequence/scheme.h"

namespace isomer {

/// [T, k, w] → [S', k'/P, w] (all-to-all): the KV heads of the rank's query heads.
Tensor kv_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                   MemoryClass memory_class);
/// [S', k'/P, w] → [T, k, w] (all-to-all), summed over the copies of each KV head: in float32 where there are copies,
/// else in by_heads' dtype.
Tensor kv_sums_to_tokens(RankContext& ctx, const SequenceBlock& block, std::string_view name, Tensor by_heads);

}  // namespace isomer
