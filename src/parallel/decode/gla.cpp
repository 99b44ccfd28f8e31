// gla: grouped latent attention on the weights of a model that was not trained for it (the baseline of the TPLA paper):
// of the latent's blocks only the diagonal ones. Heads of group i see shard i alone, normed by its own RMS, and the
// whole rope key. g groups, each of whose heads are split over tp ranks: rank = group + g·column. Not exact.
//
//   x → q of the rank's heads, ĉ_i = c_i/RMS(c_i)·γ_i, k_pe    →  attention over [ĉ_i | k_pe]  →  W_UV[:, i], W_o
//   y = x + Σ ranks                                            ◀── all-reduce B·D ──
//
// Prefill is exact (latent_shards.h), and so are the rows that it leaves.
#include "parallel/decode/latent_shards.h"

namespace isomer {

namespace {

class GroupedLatentScheme : public StepScheme {
 public:
  explicit GroupedLatentScheme(const SchemeArguments& a) : layout_(a.layout), shards_(a.comm, a.layout, a.config) {}

  WeightSplit explicit_split(int rank) const override {
    const int groups = layout_.shards.latent_shards, columns = layout_.shards.tpa / groups;
    WeightSplit split = even_split(layout_, rank, true);
    split.head_part = rank % groups * columns + rank / groups;
    return split;
  }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    if (block.step.explicit_form) return shards_.explicit_attention(ctx, block, x);
    const Projections p = project(ctx, block, x);
    const Tensor rows = shards_.cut(ctx, p.keys);
    const IndexRange own = shards_.own();
    if (p.c) {
      const Tensor rstd =
          ctx.empty("rstd of a shard", MemoryClass::workspace, statistic_dtype(x.dtype()), {p.c.size(0)});
      rms_norm_forward(ctx, "norm of a shard", p.c.slice(1, own.begin, own.count),
                       block.weights().attention.kv_a_layernorm.slice(0, own.begin, own.count),
                       ModelConfig::kInnerNormEps, rows.select(1, 0).slice(1, 0, own.count), rstd);
    }
    store_rows(ctx, block, rows, Tensor());
    const Tensor queries = absorb(ctx, block, p.q, {{own}, {0, block.model.config.qk_rope_head_dim}});
    const PartialAttention core = attend_cache(ctx, block, queries);
    return join_heads(ctx, block, values_of(ctx, block, core.out, own), x);
  }

 private:
  DecodeLayout layout_;
  LatentShards shards_;
};

}  // namespace

std::unique_ptr<StepScheme> make_gla(const SchemeArguments& arguments) {
  return std::make_unique<GroupedLatentScheme>(arguments);
}

}  // namespace isomer
