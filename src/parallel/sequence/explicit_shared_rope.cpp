// explicit-shared-rope: as explicit, but the rope key, the same for all heads, is gathered once instead of travelling
// with every head's key.
//
//   tokens t = S/P, all heads                                     all tokens S, heads h/P
//   x → q, ĉ|k_pe → k_nope, v   ──all-to-all Q, K_nope, V──▶
//                   k_pe        ──all-gather──────────────▶       k = [k_nope | k_pe]; attention
//   y = x + W_o o               ◀──all-to-all O─────────────      o
//
// Backward: all-to-all dO, dQ, dK_nope, dV; the rope key's gradient is summed over the heads and reduce-scattered.
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct SharedRopeSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;   // [T, d + r]
  Tensor q, k, v;  // [S·batch, h/P, n + r | n + r | v]
  CoreSaved core;
  Tensor o;  // [T, h, v]
};

class ExplicitSharedRope : public SequenceScheme {
 public:
  explicit ExplicitSharedRope(Recompute recompute) : recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, v = config.v_head_dim;
    const IndexRange all_heads{0, block.layer.heads()};
    auto saved = std::make_unique<SharedRopeSaved>();
    FunctionScope scope(ctx);

    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    Tensor kv = up_project_forward(ctx, block.layer, latent, all_heads, MemoryClass::workspace);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    Tensor k_nope = tokens_to_heads(ctx, block, "k_nope", kv.slice(2, 0, n), MemoryClass::communication);
    saved->v = tokens_to_heads(ctx, block, "v", kv.slice(2, n, v), MemoryClass::saved);
    scope.release(std::move(kv));
    Tensor k_pe = gather_rows(ctx, block, "k_pe", latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim),
                              MemoryClass::communication);
    saved->latent = std::move(latent);
    saved->k = concatenate_keys(ctx, k_nope, k_pe, MemoryClass::saved);
    scope.release(std::move(k_nope));
    scope.release(std::move(k_pe));

    Tensor out = group_attention_forward(ctx, block, saved->q, saved->k, saved->v, saved->core);
    if (recompute_ == Recompute::attention) drop_core(saved->core, out);
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<SharedRopeSaved&>(*state);
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
    Backward result;

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();

    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, saved.k, saved.v, std::move(saved.core), dout);
    saved.q = saved.k = saved.v = dout = Tensor();

    const DType sum_dtype = statistic_dtype(dy.dtype());
    Tensor dk_pe = ctx.empty("d k_pe", MemoryClass::workspace, sum_dtype, {dk.size(0), r});
    sum_heads(ctx, "dk_pe over heads", dk.slice(2, n, r), dk_pe);
    Tensor dk_pe_local = scatter_sum_rows(ctx, block, "dk_pe", dk_pe);
    dk_pe = Tensor();
    Tensor dk_nope = ctx.empty("dk_nope", MemoryClass::workspace, dy.dtype(), {dk.size(0), dk.size(1), n});
    copy(ctx, "cut dk_nope", dk.slice(2, 0, n), dk_nope);
    dk = Tensor();
    Tensor dk_local = heads_to_tokens(ctx, block, "dK_nope", dk_nope, MemoryClass::communication);
    dk_nope = Tensor();
    Tensor dv_local = heads_to_tokens(ctx, block, "dV", dv, MemoryClass::communication);
    dv = Tensor();
    Tensor dkv =
        ctx.empty("d kv_b output", MemoryClass::workspace, dy.dtype(), {dk_local.size(0), dk_local.size(1), n + v});
    copy(ctx, "join dk_nope", dk_local, dkv.slice(2, 0, n));
    copy(ctx, "join dv", dv_local, dkv.slice(2, n, v));
    dk_local = dv_local = Tensor();
    Tensor dlatent = ctx.empty("d latent", MemoryClass::workspace, sum_dtype, saved.latent.shape());
    copy(ctx, "join dk_pe", dk_pe_local, dlatent.slice(1, config.kv_lora_rank, r));
    up_project_backward(ctx, block.layer, saved.latent, {0, block.layer.heads()}, dkv, dlatent, result.gradients);
    dkv = saved.latent = dk_pe_local = Tensor();

    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local), std::move(dlatent),
                                 std::move(dy), result.gradients);
    return result;
  }

 private:
  Recompute recompute_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_explicit_shared_rope(const Layout& layout) {
  return std::make_unique<ExplicitSharedRope>(recompute_of(layout));
}

}  // namespace isomer
