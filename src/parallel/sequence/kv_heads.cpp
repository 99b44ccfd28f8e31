#include "parallel/sequence/kv_heads.h"

#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"

namespace isomer {

namespace {

KvHeadShards shards_of(const SequenceBlock& block) {
  return {block.layer.config.num_key_value_heads, block.tokens.ranks_per_group};
}

/// [T, k, w] → [T, k', w]: every KV head and its copies, neighbours.
Tensor with_copies(RankContext& ctx, std::string_view name, const Tensor& local, const KvHeadShards& shards) {
  const Tensor spread = ctx.empty(fmt::format("{} copies", name), MemoryClass::communication, local.dtype(),
                                  {local.size(0), shards.with_copies(), local.size(2)});
  for (std::int64_t kv = 0; kv < shards.num_kv_heads; ++kv) {
    const Tensor one = local.slice(1, kv, 1).select(1, 0);  // [T, w]
    copy(ctx, "copy kv head", one.broadcast(1, shards.copies()),
         spread.slice(1, kv * shards.copies(), shards.copies()));
  }
  return spread;
}

}  // namespace

Tensor kv_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                   MemoryClass memory_class) {
  const KvHeadShards shards = shards_of(block);
  if (shards.copies() == 1) return tokens_to_heads(ctx, block, name, local, memory_class);
  // A rank with one KV head is sent a view of it; one with several may have the same twice, for which there is none.
  if (shards.per_rank() > 1) {
    return tokens_to_heads(ctx, block, name, with_copies(ctx, name, local, shards), memory_class);
  }
  std::vector<Tensor> to_rank;
  for (int peer = 0; peer < shards.num_ranks; ++peer) to_rank.push_back(local.slice(1, shards.kv_head(peer), 1));
  return views_to_heads(ctx, block, name, to_rank, memory_class);
}

Tensor kv_sums_to_tokens(RankContext& ctx, const SequenceBlock& block, std::string_view name, Tensor by_heads) {
  const KvHeadShards shards = shards_of(block);
  Tensor local = heads_to_tokens(ctx, block, name, by_heads, MemoryClass::communication);
  by_heads = Tensor();
  if (shards.copies() == 1) return local;
  const std::int64_t rows = local.size(0), width = local.size(2);
  Tensor sums = ctx.empty(fmt::format("{} summed", name), MemoryClass::workspace, statistic_dtype(local.dtype()),
                          {rows, shards.num_kv_heads, width});
  sum_heads(ctx, fmt::format("{} over copies", name),
            local.reshape({rows * shards.num_kv_heads, shards.copies(), width}), sums.flatten(0, 1));
  return sums;
}

}  // namespace isomer
