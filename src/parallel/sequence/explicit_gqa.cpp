// explicit, for grouped-query attention: queries, keys and values travel as heads (DeepSpeed-Ulysses).
//
//   tokens t = S/P, all heads                           all tokens S, query heads h/P and their KV heads
//   x → q, k, v            ──all-to-all Q, K, V──▶      attention
//   y = x + W_o o          ◀──all-to-all O──────────    o
//
// Where P does not divide the KV heads, copies of them travel (kv_copies), so that every rank has the KV heads that its
// query heads use. The backward runs the same arrows the other way, and sums dK and dV over the copies. With a second
// axis, explicit:P,ring:G, tokens are those of a group of P ranks, and K and V of the rank's heads pass round the G
// groups (ring_attention.h).
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/kv_heads.h"
#include "parallel/sequence/partial_attention.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct ExplicitGqaSaved : SequenceScheme::Saved {
  GqaProjectSaved project;
  Tensor q;     // [S', h/P, w], S' the rows of the group
  Tensor k, v;  // [S', k'/P, w], k' the KV heads with their copies
  CoreSaved core;
  Tensor o;  // [T, h, w], the input of W_o
};

class ExplicitGqa : public SequenceScheme {
 public:
  explicit ExplicitGqa(Recompute recompute) : recompute_(recompute) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<ExplicitGqaSaved>();
    FunctionScope scope(ctx);

    auto [q, k, v] = gqa_project_forward(ctx, block.layer, x, saved->project);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->k = kv_to_heads(ctx, block, "k", k, MemoryClass::saved);
    scope.release(std::move(k));
    saved->v = kv_to_heads(ctx, block, "v", v, MemoryClass::saved);
    scope.release(std::move(v));

    Tensor out = group_attention_forward(ctx, block, saved->q, saved->k, saved->v, saved->core);
    if (recompute_ == Recompute::attention) drop_core(saved->core, out);
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<ExplicitGqaSaved&>(*state);
    Backward result;

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();

    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, saved.k, saved.v, std::move(saved.core), dout);
    saved.q = saved.k = saved.v = dout = Tensor();

    dk = rounded(ctx, "dk", dk, dy.dtype());
    dv = rounded(ctx, "dv", dv, dy.dtype());
    Tensor dk_local = kv_sums_to_tokens(ctx, block, "dK", std::move(dk));
    Tensor dv_local = kv_sums_to_tokens(ctx, block, "dV", std::move(dv));
    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = gqa_project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local),
                                     std::move(dk_local), std::move(dv_local), std::move(dy), result.gradients);
    return result;
  }

 private:
  Recompute recompute_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_explicit_gqa(const Layout& layout) {
  return std::make_unique<ExplicitGqa>(recompute_of(layout));
}

}  // namespace isomer
