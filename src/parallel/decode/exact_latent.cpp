// exact-latent: the latent row's columns over g ranks, and the logits summed before the softmax: what tensor-parallel
// latent attention costs where nothing may be lost. The rope logit enters once: on rank 0 (rope=whole), or in parts
// (rope=split).
//
//   x → q of all heads, ĉ_i, k_pe
//   z_i = q̃_i·ĉ_i (+ rope)      ── all-reduce 4·B·h·C ──▶   p = softmax(s·z), the same on every rank
//   õ_i = Σ p ĉ_i → W_UV[:, i], W_o of all heads → y = x + all-reduce B·D
#include "kernels/matmul.h"
#include "parallel/decode/latent_shards.h"

namespace isomer {

namespace {

/// One sequence's part of the logits, [queries, heads, keys].
struct LogitBlock {
  const StepSequence& sequence;
  Tensor logits;
  std::vector<TokenRun> runs;  // of its keys; they begin at position 0 and are complete
  std::int64_t queries() const { return sequence.positions.count; }
};

class ExactLatentScheme : public StepScheme {
 public:
  explicit ExactLatentScheme(const SchemeArguments& a)
      : layout_(a.layout), config_(a.config), shards_(a.comm, a.layout, a.config) {}

  WeightSplit explicit_split(int rank) const override { return dealt_split(layout_, config_, rank); }
  WeightSplit absorbed_split(int) const override { return {}; }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    if (block.step.explicit_form) return shards_.explicit_attention(ctx, block, x);
    const Projections p = project(ctx, block, x);
    store_rows(ctx, block, shards_.cut(ctx, p.keys), Tensor());
    const bool has_rope = !layout_.shards.whole_rope || shards_.shard() == 0;
    const Tensor queries = absorb(ctx, block, p.q, {{shards_.own()}, has_rope ? shards_.rope() : IndexRange{0, 0}});
    return join_heads(ctx, block, values_of(ctx, block, attend(ctx, block, queries), shards_.own()), x);
  }

 private:
  /// q [T, h, own (+ rope)] → Σ p ĉ_i [T, h, own].
  Tensor attend(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const;

  DecodeLayout layout_;
  const ModelConfig& config_;
  LatentShards shards_;
};

/// The logits of all sequences, one buffer, so that they are summed by one message.
std::vector<LogitBlock> make_blocks(RankContext& ctx, const DecodeBlock& block, std::int64_t heads, Tensor& all) {
  std::int64_t total = 0;
  for (const StepSequence& s : block.step.sequences) total += s.positions.count * heads * s.positions.end();
  all = ctx.empty("logits", MemoryClass::communication, statistic_dtype(block.dtype()), {total});
  std::vector<LogitBlock> blocks;
  std::int64_t begin = 0;
  for (const StepSequence& s : block.step.sequences) {
    const std::int64_t count = s.positions.count * heads * s.positions.end();
    blocks.push_back({s, all.slice(0, begin, count).reshape({s.positions.count, heads, s.positions.end()}),
                      block.cache.runs(s.sequence, 0, s.positions.end())});
    begin += count;
  }
  return blocks;
}

void partial_logits(RankContext& ctx, const LogitBlock& b, const Tensor& q, const Tensor& keys) {
  const Tensor queries = q.slice(0, b.sequence.first_row, b.queries()).flatten(0, 1);
  const Tensor logits = b.logits.flatten(0, 1);
  for (const TokenRun& run : b.runs) {
    const Tensor rows = keys.slice(0, run.row, run.length).select(1, 0).slice(1, 0, q.size(2));
    matmul(ctx, "partial logits", queries, rows.transpose(0, 1), logits.slice(1, run.position, run.length));
  }
}

/// out [queries·heads, own] from the summed logits, which it overwrites.
void weighted_rows(RankContext& ctx, const DecodeBlock& block, const LogitBlock& b, const Tensor& values,
                   const Tensor& out) {
  const Tensor by_head = b.logits.transpose(0, 1);
  softmax_forward(ctx, "softmax", by_head, softmax_scale(block.model.config), true, b.sequence.positions.begin,
                  by_head);
  const Tensor p = as_dtype(ctx, "p in the cache's type", b.logits, values.dtype()).flatten(0, 1);
  bool first = true;
  for (const TokenRun& run : b.runs) {
    matmul(ctx, "p ĉ", p.slice(1, run.position, run.length), values.slice(0, run.row, run.length).select(1, 0), out,
           !first);
    first = false;
  }
}

Tensor ExactLatentScheme::attend(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const {
  const Tensor keys = block.cache.keys(block.index), values = block.cache.values(block.index);
  const std::int64_t heads = q.size(1), width = values.size(2);
  Tensor all;
  const std::vector<LogitBlock> blocks = make_blocks(ctx, block, heads, all);
  const Tensor queries = as_dtype(ctx, "q in the cache's type", q, keys.dtype());
  for (const LogitBlock& b : blocks) partial_logits(ctx, b, queries, keys);
  shards_.group().all_reduce("logits", all);
  const Tensor out =
      ctx.empty("õ of a shard", MemoryClass::workspace, statistic_dtype(q.dtype()), {q.size(0), heads, width});
  for (const LogitBlock& b : blocks) {
    weighted_rows(ctx, block, b, values, out.slice(0, b.sequence.first_row, b.queries()).flatten(0, 1));
  }
  return as_dtype(ctx, "õ of a shard", out, q.dtype());
}

}  // namespace

std::unique_ptr<StepScheme> make_exact_latent(const SchemeArguments& arguments) {
  return std::make_unique<ExactLatentScheme>(arguments);
}

}  // namespace isomer
