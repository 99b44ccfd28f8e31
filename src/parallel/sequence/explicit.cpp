// explicit: keys and values are up-projected where their tokens live, and travel as heads (DeepSpeed-Ulysses on MLA).
//
//   tokens t = S/P, all heads                          all tokens S, heads h/P
//   x → q, ĉ|k_pe → k, v   ──all-to-all Q, K, V──▶    attention
//   y = x + W_o o          ◀──all-to-all O──────────   o
//
// The backward runs the same arrows the other way: all-to-all dO, then dQ, dK, dV. With a second axis,
// explicit:P,ring:G, tokens are those of a group of P ranks, and K and V of the rank's heads pass round the G groups
// (ring_attention.h).
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/partial_attention.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct ExplicitSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;   // [T, d + r]
  Tensor q, k, v;  // [S·batch, h/P, n + r | n + r | v]
  CoreSaved core;
  Tensor o;  // [T, h, v], the input of W_o
};

class Explicit : public SequenceScheme {
 public:
  explicit Explicit(Recompute recompute) : recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    const auto& config = block.layer.config;
    const IndexRange all_heads{0, block.layer.heads()};
    auto saved = std::make_unique<ExplicitSaved>();
    FunctionScope scope(ctx);

    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    Tensor kv = up_project_forward(ctx, block.layer, latent, all_heads, MemoryClass::workspace);
    Tensor k = concatenate_keys(ctx, kv.slice(2, 0, config.qk_nope_head_dim),
                                latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim), MemoryClass::workspace);
    saved->latent = std::move(latent);

    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->k = tokens_to_heads(ctx, block, "k", k, MemoryClass::saved);
    scope.release(std::move(k));
    saved->v =
        tokens_to_heads(ctx, block, "v", kv.slice(2, config.qk_nope_head_dim, config.v_head_dim), MemoryClass::saved);
    scope.release(std::move(kv));

    Tensor out = group_attention_forward(ctx, block, saved->q, saved->k, saved->v, saved->core);
    if (recompute_ == Recompute::attention) drop_core(saved->core, out);
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<ExplicitSaved&>(*state);
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
    Backward result;

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();

    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, saved.k, saved.v, std::move(saved.core), dout);
    saved.q = saved.k = saved.v = dout = Tensor();

    dk = rounded(ctx, "dk", dk, dy.dtype());
    dv = rounded(ctx, "dv", dv, dy.dtype());
    Tensor dk_local = heads_to_tokens(ctx, block, "dK", dk, MemoryClass::communication);
    dk = Tensor();
    Tensor dv_local = heads_to_tokens(ctx, block, "dV", dv, MemoryClass::communication);
    dv = Tensor();
    Tensor dkv =
        ctx.empty("d kv_b output", MemoryClass::workspace, dy.dtype(), {dk_local.size(0), dk_local.size(1), n + v});
    copy(ctx, "join dk_nope", dk_local.slice(2, 0, n), dkv.slice(2, 0, n));
    copy(ctx, "join dv", dv_local, dkv.slice(2, n, v));
    dv_local = Tensor();
    Tensor dlatent = ctx.empty("d latent", MemoryClass::workspace, statistic_dtype(dy.dtype()), saved.latent.shape());
    sum_heads(ctx, "dk_pe over heads", dk_local.slice(2, n, r), dlatent.slice(1, config.kv_lora_rank, r));
    dk_local = Tensor();
    up_project_backward(ctx, block.layer, saved.latent, {0, block.layer.heads()}, dkv, dlatent, result.gradients);
    dkv = saved.latent = Tensor();

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

std::unique_ptr<SequenceScheme> make_explicit(const Layout& layout) {
  return std::make_unique<Explicit>(recompute_of(layout));
}

}  // namespace isomer
