// kvp: the cache split over the sequence, in chunks round-robin; exact (Helix, section 2; here with gathered queries).
// Heads' weights are split as in tp.
//
//   decode    x → q̃ of h/N heads ── all-gather ──▶ all heads over the slice: partial õ, lse
//             lse ── all-gather ──▶ weight of the slice e^(lse − total)
//             weighted õ ── reduce-scatter ──▶ õ of h/N heads → W_UV, W_o → y = x + all-reduce
//   prefill   blocks of cached rows ── all-gather ──▶ explicit form of h/N heads, as in tp
#include <numeric>

#include "kernels/attention_parts.h"
#include "parallel/decode/stages.h"

namespace isomer {

namespace {

/// [T, h/N, w] of every rank → [T, h, w].
Tensor gather_heads(RankContext& ctx, const DecodeBlock& block, const Tensor& q) {
  const int ranks = block.comm.size();
  if (ranks == 1) return q;
  const std::int64_t mine = q.size(1);
  Tensor all = ctx.empty("q of all heads", MemoryClass::communication, q.dtype(), {q.size(0), ranks * mine, q.size(2)});
  std::vector<Tensor> receive;
  for (int rank = 0; rank < ranks; ++rank) receive.push_back(all.slice(1, rank * mine, mine));
  block.comm.all_gather("q", q, receive);
  return all;
}

/// Partial results of all heads over every rank's slice → the merged result of this rank's heads, [T, h/N, w].
Tensor merge_slices(RankContext& ctx, const DecodeBlock& block, const PartialAttention& partial) {
  const int ranks = block.comm.size();
  if (ranks == 1) return partial.out;
  const Tensor lses = ctx.empty("lse of all slices", MemoryClass::communication, partial.lse.dtype(),
                                {ranks, partial.lse.size(0), partial.lse.size(1)});
  std::vector<Tensor> receive, send;
  for (int rank = 0; rank < ranks; ++rank) receive.push_back(lses.select(0, rank));
  block.comm.all_gather("lse", partial.lse, receive);
  weigh_partial_attention(ctx, partial.out, lses, block.comm.rank());
  const std::int64_t mine = partial.out.size(1) / ranks;
  for (int rank = 0; rank < ranks; ++rank) send.push_back(partial.out.slice(1, rank * mine, mine));
  Tensor merged = ctx.empty("merged o", MemoryClass::workspace, partial.out.dtype(),
                            {partial.out.size(0), mine, partial.out.size(2)});
  block.comm.reduce_scatter("partial o", send, merged);
  return merged;
}

/// Rows of every slice, one slice behind the other: [Σ counts, KV heads, w] from `mine` [counts[rank], KV heads, w].
Tensor gather_slices(RankContext& ctx, const DecodeBlock& block, std::string_view name, const Tensor& mine,
                     const std::vector<std::int64_t>& counts) {
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  Tensor all = ctx.empty(name, MemoryClass::communication, mine.dtype(), {total, mine.size(1), mine.size(2)});
  std::vector<Tensor> receive;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    receive.push_back(all.slice(0, begin, count));
    begin += count;
  }
  block.comm.all_gather(name, mine, receive);
  return all;
}

/// The KV heads that the rank's query heads use.
Tensor own_kv_heads(const DecodeBlock& block, const Tensor& rows) {
  const IndexRange heads = kv_heads_of(block.model.config, block.part().split);
  return rows.slice(1, heads.begin, heads.count);
}

/// A block of positions from all slices, with the KV heads that this rank needs.
CachedRows gather_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence, IndexRange positions) {
  const CacheShards& shards = block.cache.options().shards;
  std::vector<std::int64_t> counts;
  CachedRows all;
  std::int64_t row = 0;
  for (int slice = 0; slice < shards.num_slices; ++slice) {
    const std::int64_t first = row;
    for (const IndexRange& range : shards.ranges(slice, positions.begin, positions.end())) {
      all.runs.push_back({.row = row, .length = range.count, .position = range.begin});
      row += range.count;
    }
    counts.push_back(row - first);
  }
  const CachedRows mine = load_rows(ctx, block, sequence, positions);
  all.keys = gather_slices(ctx, block, "prefix keys", mine.keys, counts);
  if (block.is_latent()) return all;
  all.keys = own_kv_heads(block, all.keys);
  all.values = own_kv_heads(block, gather_slices(ctx, block, "prefix values", mine.values, counts));
  return all;
}

class KvParallelScheme : public StepScheme {
 public:
  explicit KvParallelScheme(const DecodeLayout& layout) : layout_(layout) {}
  WeightSplit explicit_split(int rank) const override { return even_split(layout_, rank, false); }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    const Tensor q = project_and_cache(ctx, block, x);
    if (block.step.explicit_form) {
      const auto rows_of_all = [&](const StepSequence& sequence, IndexRange positions) {
        return gather_rows(ctx, block, sequence, positions);
      };
      return join_heads(ctx, block, attend_prefix(ctx, block, q, rows_of_all).out, x);
    }
    const Tensor all_queries = gather_heads(ctx, block, absorb(ctx, block, q));
    const Tensor core = merge_slices(ctx, block, attend_cache(ctx, block, all_queries));
    return join_heads(ctx, block, values_of(ctx, block, core), x);
  }

 private:
  DecodeLayout layout_;
};

}  // namespace

std::unique_ptr<StepScheme> make_kvp(const SchemeArguments& arguments) {
  return std::make_unique<KvParallelScheme>(arguments.layout);
}

}  // namespace isomer
