// absorbed: attention in the latent space. W_UK moves into the query and W_UV behind the core, so that keys and values
// are the gathered latent itself, one for all heads.
//
//   tokens t = S/P, all heads                        all tokens S, heads h/P
//   x → q              ──all-to-all Q───────▶       q → q̃ = q_nope·W_UK
//   x → ĉ|k_pe         ──all-gather latent──▶       õ = attention([q̃ | q_pe], ĉ|k_pe, ĉ)
//   y = x + W_o o      ◀──all-to-all O───────       o = õ·W_UVᵀ
//
// Queries and outputs travel un-absorbed, so the bytes are LAGA's. Backward: all-to-all dO, all-to-all dQ,
// reduce-scatter of the latent's gradient in float32.
//
// absorbed-two-product keeps q̃ and q_pe apart: an eager core then has two score products, as the LAGA paper's
// measurements suggest its absorbed path has.
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct AbsorbedSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;      // [S·batch, d + r], gathered
  Tensor q;           // [S·batch, h/P, n + r]
  Tensor q_absorbed;  // [S·batch, h/P, d + r], or d where q_pe stays apart
  CoreSaved core;
  Tensor o_latent;  // [S·batch, h/P, d], õ
  Tensor o;         // [T, h, v]
};

Tensor by_head(const Tensor& t) { return t.transpose(0, 1); }

class Absorbed : public SequenceScheme {
 public:
  Absorbed(bool two_products, Recompute recompute) : two_products_(two_products), recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    const auto& config = block.layer.config;
    auto saved = std::make_unique<AbsorbedSaved>();
    FunctionScope scope(ctx);

    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->latent = gather_rows(ctx, block, "latent", latent, MemoryClass::saved);
    scope.release(std::move(latent));

    const auto [w_uk, w_uv] = my_up_projections(block);
    absorb_queries(ctx, config, w_uk, *saved);
    saved->o_latent = attention_core_forward(ctx, block.core, core_inputs(block, *saved), saved->core);
    Tensor out = ctx.empty("o by heads", MemoryClass::workspace, saved->q.dtype(),
                           {saved->q.size(0), saved->q.size(1), config.v_head_dim});
    matmul(ctx, "W_UV õ", by_head(saved->o_latent), w_uv.transpose(1, 2), by_head(out));
    if (recompute_ == Recompute::attention) {
      drop_core(saved->core, saved->o_latent);
      scope.release(std::move(saved->o_latent));
    }
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<AbsorbedSaved&>(*state);
    const auto& config = block.layer.config;
    const IndexRange my_heads = block.my_heads();
    Backward result;

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();

    if (!saved.o_latent) {
      saved.o_latent = attention_core_forward(ctx, block.core, core_inputs(block, saved), saved.core);
    }
    const auto [w_uk, w_uv] = my_up_projections(block);
    const Tensor dkv_b = make_up_projection_gradient(ctx, block.layer, my_heads, result.gradients);
    const auto [dw_uk, dw_uv] = up_projection_views(config, dkv_b, {0, my_heads.count});
    matmul(ctx, "d W_UV", by_head(dout).transpose(1, 2), by_head(saved.o_latent), dw_uv);
    Tensor do_latent = ctx.empty("d õ", MemoryClass::workspace, dy.dtype(), saved.o_latent.shape());
    matmul(ctx, "dx W_UV", by_head(dout), w_uv, by_head(do_latent));
    saved.o_latent = dout = Tensor();

    const DType sum_dtype = statistic_dtype(dy.dtype());
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim;
    Tensor dq_rope;
    if (has_rope_queries(config)) {
      dq_rope = ctx.empty("dq rope", MemoryClass::workspace, dy.dtype(), {saved.q.size(0), saved.q.size(1), r});
    }
    Tensor dq_absorbed = ctx.empty("d q absorbed", MemoryClass::workspace, dy.dtype(), saved.q_absorbed.shape());
    Tensor dlatent = ctx.empty("d gathered latent", MemoryClass::workspace, sum_dtype, saved.latent.shape());
    Tensor dvalues =
        ctx.empty("d latent as values", MemoryClass::workspace, sum_dtype, {saved.latent.size(0), config.kv_lora_rank});
    attention_core_backward(ctx, block.core, core_inputs(block, saved), std::move(saved.core), do_latent,
                            core_gradients(config, dq_rope, dq_absorbed, dlatent, dvalues));
    do_latent = saved.latent = saved.q_absorbed = Tensor();
    const Tensor dkeys = dlatent.slice(1, 0, config.kv_lora_rank);
    add(ctx, "d latent", dkeys, dvalues, dkeys);
    dvalues = Tensor();
    // Only now: dq would stand idle through the core's peak.
    Tensor dq = ctx.empty("dq", MemoryClass::workspace, dy.dtype(), saved.q.shape());
    absorb_backward(ctx, config, w_uk, saved.q, dq_absorbed, dq, dw_uk);
    if (r > 0) {
      const Tensor dq_pe = dq_rope ? dq_rope : dq_absorbed.slice(2, config.kv_lora_rank, r);
      copy(ctx, "join dq_pe", dq_pe, dq.slice(2, n, r));
    }
    dq_absorbed = dq_rope = saved.q = Tensor();

    Tensor dlatent_local = scatter_sum_rows(ctx, block, "d latent", dlatent);
    dlatent = Tensor();
    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local),
                                 std::move(dlatent_local), std::move(dy), result.gradients);
    return result;
  }

 private:
  static UpProjectionViews my_up_projections(const SequenceBlock& block) {
    return up_projection_views(block.layer.config, block.layer.weights.kv_b_proj, block.my_heads());
  }

  void absorb_queries(RankContext& ctx, const ModelConfig& config, const Tensor& w_uk, AbsorbedSaved& saved) const {
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, d = config.kv_lora_rank;
    const Tensor& q = saved.q;
    saved.q_absorbed =
        ctx.empty("q absorbed", MemoryClass::saved, q.dtype(), {q.size(0), q.size(1), two_products_ ? d : d + r});
    matmul(ctx, "absorb q", by_head(q.slice(2, 0, n)), w_uk, by_head(saved.q_absorbed.slice(2, 0, d)));
    if (!two_products_ && r > 0) copy(ctx, "concatenate q_pe", q.slice(2, n, r), saved.q_absorbed.slice(2, d, r));
  }

  /// True where the core is given the queries' rope columns apart.
  bool has_rope_queries(const ModelConfig& config) const { return two_products_ && config.qk_rope_head_dim > 0; }

  /// dq_nope = dq̃·W_UKᵀ, dW_UK = q_nopeᵀ·dq̃.
  void absorb_backward(RankContext& ctx, const ModelConfig& config, const Tensor& w_uk, const Tensor& q,
                       const Tensor& dq_absorbed, const Tensor& dq, const Tensor& dw_uk) const {
    const std::int64_t n = config.qk_nope_head_dim, d = config.kv_lora_rank;
    const Tensor dq_latent = by_head(dq_absorbed.slice(2, 0, d));
    matmul(ctx, "d W_UK", by_head(q.slice(2, 0, n)).transpose(1, 2), dq_latent, dw_uk);
    matmul(ctx, "dx absorb q", dq_latent, w_uk.transpose(1, 2), by_head(dq.slice(2, 0, n)));
  }

  AttentionInputs core_inputs(const SequenceBlock& block, const AbsorbedSaved& saved) const {
    const auto& config = block.layer.config;
    const std::int64_t d = config.kv_lora_rank, r = config.qk_rope_head_dim;
    const Tensor latent = saved.latent.unflatten(1, {1, d + r});  // one key/value head
    const Tensor values = latent.slice(2, 0, d);
    if (!has_rope_queries(config)) return whole_sequence_inputs(block, saved.q_absorbed, latent, values);
    return whole_sequence_inputs(block, saved.q_absorbed, values, values, saved.q.slice(2, config.qk_nope_head_dim, r),
                                 latent.slice(2, d, r));
  }

  AttentionGradients core_gradients(const ModelConfig& config, const Tensor& dq_rope, const Tensor& dq_absorbed,
                                    const Tensor& dlatent, const Tensor& dvalues) const {
    const std::int64_t d = config.kv_lora_rank, r = config.qk_rope_head_dim;
    const Tensor dkeys = dlatent.unflatten(1, {1, d + r}), dv = dvalues.unflatten(1, {1, d});
    if (!has_rope_queries(config)) return {.dq = dq_absorbed, .dk = dkeys, .dv = dv};
    return {
        .dq = dq_absorbed, .dk = dkeys.slice(2, 0, d), .dv = dv, .dq_rope = dq_rope, .dk_rope = dkeys.slice(2, d, r)};
  }

  bool two_products_;
  Recompute recompute_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_absorbed(const Layout& layout) {
  return std::make_unique<Absorbed>(false, recompute_of(layout));
}
std::unique_ptr<SequenceScheme> make_absorbed_two_product(const Layout& layout) {
  return std::make_unique<Absorbed>(true, recompute_of(layout));
}

}  // namespace isomer
