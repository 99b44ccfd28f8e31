// tpla: tensor-parallel latent attention (arXiv 2508.15881), on a checkpoint that `isomer convert tpla` made and with
// the scalars of its side file. The latent's columns over g shards; all heads attend to each shard by a softmax of
// their own, and the outputs are summed. A head split over tp ranks beside it: rank = shard + g·column. Not exact.
//
//   x → q of all heads (of h/tp), rows [ĉ_S | ĉ_i | k_pe], the RMS exact or sqrt(a_i·‖c_S,c_i‖²/d + ε)
//   z = s·(q̃_S·ĉ_S + κ_i·q̃_i·ĉ_i + q_pe·k_pe),  p = softmax(z)  →  õ = Σ p ĉ_i, on shard 0 Σ p ĉ_S too
//   wo=replicate   W_UV[:, i], W_o of all heads                               y = x + all-reduce B·D
//   wo=scatter     W_UV[:, i] ── reduce-scatter h·v by heads ──▶ W_o of h/g heads   y = x + all-reduce B·D
//
// Prefill is exact (latent_shards.h), and so are the rows that it leaves.
#include <algorithm>
#include <cmath>

#include "kernels/attention_parts.h"
#include "parallel/decode/latent_shards.h"

namespace isomer {

namespace {

class TplaScheme : public StepScheme {
 public:
  explicit TplaScheme(const SchemeArguments& a)
      : layout_(a.layout), config_(a.config), tpla_(*a.tpla), shards_(a.comm, a.layout, a.config) {}

  WeightSplit explicit_split(int rank) const override { return dealt_split(layout_, config_, rank); }
  WeightSplit absorbed_split(int rank) const override {
    return {.head_parts = columns(), .head_part = rank / layout_.shards.latent_shards};
  }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    if (block.step.explicit_form) return shards_.explicit_attention(ctx, block, x);
    const Projections p = project(ctx, block, x);
    const Tensor rows = shards_.cut(ctx, p.keys);
    if (p.c && tpla_.options.rms == TplaRms::sliced) norm_slice(ctx, block, p.c, rows);
    store_rows(ctx, block, rows, Tensor());
    const PartialAttention core = attend_cache(ctx, block, queries(ctx, block, p.q));
    const Tensor values = shard_values(ctx, block, core.out);
    return layout_.shards.scatter_values ? join_scattered(ctx, block, values, x) : join_heads(ctx, block, values, x);
  }

 private:
  int columns() const { return layout_.shards.tpa / layout_.shards.latent_shards; }
  const TplaLayer& layer(const DecodeBlock& block) const { return tpla_.layers[static_cast<std::size_t>(block.index)]; }
  void norm_slice(RankContext& ctx, const DecodeBlock& block, const Tensor& c, const Tensor& rows) const;
  Tensor queries(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const;
  Tensor shard_values(RankContext& ctx, const DecodeBlock& block, const Tensor& core) const;
  Tensor join_scattered(RankContext& ctx, const DecodeBlock& block, const Tensor& values, const Tensor& x) const;

  DecodeLayout layout_;
  const ModelConfig& config_;
  const TplaModel& tpla_;
  LatentShards shards_;
};

/// Puts ĉ by the estimated RMS into rows [T, 1, shared + own + rope]. With W columns here, √(a‖c‖²/d + ε) =
/// k·√(‖c‖²/W + ε/k²), k² = a·W/d: a norm over the W columns with another ε, then a factor.
void TplaScheme::norm_slice(RankContext& ctx, const DecodeBlock& block, const Tensor& c, const Tensor& rows) const {
  const IndexRange shared = shards_.shared(), own = shards_.own();
  const std::int64_t width = shared.count + own.count;
  const Tensor& gamma = block.weights().attention.kv_a_layernorm;
  const Tensor c_here = ctx.empty("c of a shard", MemoryClass::workspace, c.dtype(), {c.size(0), width});
  const Tensor gamma_here = ctx.empty("norm of a shard", MemoryClass::workspace, gamma.dtype(), {width});
  std::int64_t to = 0;
  for (const IndexRange& range : {shared, own}) {
    if (range.count == 0) continue;
    copy(ctx, "cut c", c.slice(1, range.begin, range.count), c_here.slice(1, to, range.count));
    copy(ctx, "cut norm", gamma.slice(0, range.begin, range.count), gamma_here.slice(0, to, range.count));
    to += range.count;
  }
  const double k_squared = layer(block).rms_scale[static_cast<std::size_t>(shards_.shard())] *
                           static_cast<double>(width) / static_cast<double>(block.model.config.kv_lora_rank);
  const Tensor out = rows.select(1, 0).slice(1, 0, width);
  const Tensor rstd = ctx.empty("rstd of a shard", MemoryClass::workspace, statistic_dtype(c.dtype()), {c.size(0)});
  rms_norm_forward(ctx, "norm of a shard", c_here, gamma_here, ModelConfig::kInnerNormEps / k_squared, out, rstd);
  scaled_sum(ctx, "sliced RMS", out, Tensor(), 1 / std::sqrt(k_squared), out);
}

/// [T, h', shared + own + rope], κ in the own columns.
Tensor TplaScheme::queries(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const {
  const IndexRange shared = shards_.shared(), own = shards_.own();
  Tensor absorbed = absorb(ctx, block, q, {{shared, own}, {0, block.model.config.qk_rope_head_dim}});
  const IndexRange heads = query_heads_of(block.model.config, block.part().split);
  std::vector<double> kappa;
  for (std::int64_t head = heads.begin; head < heads.end(); ++head) {
    kappa.push_back(layer(block).kappa[static_cast<std::size_t>(head * tpla_.options.num_shards + shards_.shard())]);
  }
  if (std::any_of(kappa.begin(), kappa.end(), [](double k) { return k != 1; })) {
    scale_heads(ctx, "kappa", absorbed.slice(2, shared.count, own.count), kappa);
  }
  return absorbed;
}

/// W_UV of the columns whose values this shard adds: its own, on shard 0 the shared ones before them.
Tensor TplaScheme::shard_values(RankContext& ctx, const DecodeBlock& block, const Tensor& core) const {
  const IndexRange shared = shards_.shared(), own = shards_.own();
  if (shards_.shard() == 0) return values_of(ctx, block, core, {0, own.end()});
  if (own.count == 0) {
    return ctx.zeros("o", MemoryClass::workspace, core.dtype(),
                     {core.size(0), core.size(1), block.model.config.v_head_dim});
  }
  return values_of(ctx, block, core.slice(2, shared.count, own.count), own);
}

Tensor TplaScheme::join_scattered(RankContext& ctx, const DecodeBlock& block, const Tensor& values,
                                  const Tensor& x) const {
  const std::int64_t mine = values.size(1) / shards_.num_shards();
  std::vector<Tensor> send;
  for (int shard = 0; shard < shards_.num_shards(); ++shard) send.push_back(values.slice(1, shard * mine, mine));
  const Tensor sum =
      ctx.empty("o of own heads", MemoryClass::workspace, values.dtype(), {values.size(0), mine, values.size(2)});
  shards_.group().reduce_scatter("v partials", send, sum);
  const auto& weights = block.model.explicit_part.weights.layers[static_cast<std::size_t>(block.index)];
  return join_heads(ctx, block, weights.attention, sum, x);
}

}  // namespace

std::unique_ptr<StepScheme> make_tpla(const SchemeArguments& arguments) {
  return std::make_unique<TplaScheme>(arguments);
}

}  // namespace isomer
