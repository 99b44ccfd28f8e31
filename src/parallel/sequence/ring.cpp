// ring: keys and values of all heads pass round; a rank keeps its tokens' queries (ring attention with zigzag order).
// No all-to-all, so ranks may exceed heads.
//
//   rank p of P, tokens t = S/P, parts p and 2P−1−p of the sequence, all heads
//   x → q, ĉ|k_pe → K, V     K, V ──▶ rank p+1 ──▶ … , P − 1 hops
//   o = Σ over blocks that pass, merged by LSE          y = x + W_o o
//
// Backward: K, V pass round again, behind them the float32 sums of dK and dV, which end at their owner.
//
// Options: recompute=attention drops o and its LSE (the forward's ring runs again in the backward),
// recompute=up-projection drops K and V, rebuilt from the rank's own latent rows.
#include "kernels/elementwise.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct RingSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;       // [T, d + r]
  Tensor q;            // [T, h, n + r]
  KeysAndValues keys;  // [T, h, n + r | v]
  CoreSaved core;      // its output [T, h, v] is the input of W_o
};

class Ring : public SequenceScheme {
 public:
  explicit Ring(Recompute recompute) : recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<RingSaved>();
    FunctionScope scope(ctx);
    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    q.reclassify(MemoryClass::saved);
    saved->q = std::move(q);
    saved->latent = std::move(latent);
    saved->keys = build_keys_values(ctx, block, saved->latent, scope);

    Tensor o = group_attention_forward(ctx, block, saved->q, saved->keys.k, saved->keys.v, saved->core);
    if (recompute_ == Recompute::up_projection) saved->keys = {};
    if (recompute_ == Recompute::attention) drop_core(saved->core, o);
    Tensor y = output_forward(ctx, block.layer, o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<RingSaved&>(*state);
    Backward result;
    FunctionScope scope(ctx);
    if (!saved.keys.k) saved.keys = build_keys_values(ctx, block, saved.latent, scope);
    auto& [k, v] = saved.keys;
    if (is_dropped(saved.core)) group_attention_forward(ctx, block, saved.q, k, v, saved.core);

    Tensor dout = output_backward(ctx, block.layer, saved.core.out, dy, result.gradients);
    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, k, v, std::move(saved.core), dout);
    saved.q = k = v = dout = Tensor();

    Tensor dlatent = ctx.empty("d latent", MemoryClass::workspace, statistic_dtype(dy.dtype()), saved.latent.shape());
    up_projection_gradients(ctx, block, saved.latent, std::move(dk), std::move(dv), dlatent, result.gradients);
    saved.latent = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq), std::move(dlatent),
                                 std::move(dy), result.gradients);
    return result;
  }

 private:
  Recompute recompute_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_ring(const Layout& layout) { return std::make_unique<Ring>(recompute_of(layout)); }

}  // namespace isomer
