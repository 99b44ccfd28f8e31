// ring, for grouped-query attention: keys and values pass round; a rank keeps its tokens' queries (ring attention with
// zigzag order). No all-to-all, so ranks may exceed heads, and KV heads are never copied: what passes round is
// 2·n_kv·head_dim a token, however many query heads there are.
//
//   rank p of P, tokens t = S/P, parts p and 2P−1−p of the sequence, all heads
//   x → q, K, V                     K, V ──▶ rank p+1 ──▶ … , P − 1 hops
//   o = Σ over blocks that pass, merged by LSE          y = x + W_o o
//
// Backward: K, V pass round again, behind them the float32 sums of dK and dV, which end at their owner.
//
// Option: recompute=attention drops o and its LSE; the forward's ring runs again in the backward.
#include "parallel/sequence/heads.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct RingGqaSaved : SequenceScheme::Saved {
  GqaProjectSaved project;
  Tensor q;        // [T, h, w]
  Tensor k, v;     // [T, n_kv, w]
  CoreSaved core;  // its output [T, h, w] is the input of W_o
};

class RingGqa : public SequenceScheme {
 public:
  explicit RingGqa(Recompute recompute) : recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<RingGqaSaved>();
    auto [q, k, v] = gqa_project_forward(ctx, block.layer, x, saved->project);
    for (const Tensor& kept : {q, k, v}) kept.reclassify(MemoryClass::saved);
    saved->q = std::move(q);
    saved->k = std::move(k);
    saved->v = std::move(v);
    Tensor o = group_attention_forward(ctx, block, saved->q, saved->k, saved->v, saved->core);
    if (recompute_ == Recompute::attention) drop_core(saved->core, o);
    Tensor y = output_forward(ctx, block.layer, o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<RingGqaSaved&>(*state);
    Backward result;
    if (is_dropped(saved.core)) group_attention_forward(ctx, block, saved.q, saved.k, saved.v, saved.core);
    Tensor dout = output_backward(ctx, block.layer, saved.core.out, dy, result.gradients);
    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, saved.k, saved.v, std::move(saved.core), dout);
    saved.q = saved.k = saved.v = dout = Tensor();
    result.dx = gqa_project_backward(ctx, block.layer, std::move(saved.project), std::move(dq), std::move(dk),
                                     std::move(dv), std::move(dy), result.gradients);
    return result;
  }

 private:
  Recompute recompute_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_ring_gqa(const Layout& layout) {
  return std::make_unique<RingGqa>(recompute_of(layout));
}

}  // namespace isomer
