// laga: Latent All-Gather Attention (arXiv 2607.17644). Only the latent travels, gathered; keys and values are
// up-projected after the exchange, for the rank's own heads.
//
//   tokens t = S/P, all heads                        all tokens S, heads h/P
//   x → q              ──all-to-all Q───────▶       q
//   x → ĉ|k_pe         ──all-gather latent──▶       ĉ|k_pe → k, v   (local up-projection)
//   y = x + W_o o      ◀──all-to-all O───────       o = attention(q, k, v)
//
// Backward: all-to-all dO, all-to-all dQ, reduce-scatter of the latent's gradient in float32. Each rank holds complete
// gradients of its own heads' rows of kv_b_proj.
//
// Options: v=copy (default: V is copied out of the up-projection's output, which then goes) or v=view (V stays a view,
// and the k_nope columns beside it stay with it).
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"

namespace isomer {

namespace {

struct LagaSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;   // [S·batch, d + r], gathered
  Tensor q, k, v;  // [S·batch, h/P, n + r | n + r | v]
  CoreSaved core;
  Tensor o;  // [T, h, v]
};

class Laga : public SequenceScheme {
 public:
  explicit Laga(bool copy_values) : copy_values_(copy_values) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    const auto& config = block.layer.config;
    auto saved = std::make_unique<LagaSaved>();
    FunctionScope scope(ctx);

    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->latent = gather_rows(ctx, block, "latent", latent, MemoryClass::saved);
    scope.release(std::move(latent));

    const IndexRange my_heads = block.my_heads();
    Tensor kv = up_project_forward(ctx, block.layer, saved->latent, my_heads,
                                   copy_values_ ? MemoryClass::workspace : MemoryClass::saved);
    saved->k =
        concatenate_keys(ctx, kv.slice(2, 0, config.qk_nope_head_dim),
                         saved->latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim), MemoryClass::saved);
    saved->v = kv.slice(2, config.qk_nope_head_dim, config.v_head_dim);
    if (copy_values_) {
      const Tensor view = saved->v;
      saved->v = ctx.empty("v", MemoryClass::saved, view.dtype(), view.shape());
      copy(ctx, "copy v", view, saved->v);
    }
    scope.release(std::move(kv));

    const AttentionInputs inputs = whole_sequence_inputs(block, saved->q, saved->k, saved->v);
    Tensor out = attention_core_forward(ctx, block.core, inputs, saved->core);
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<LagaSaved&>(*state);
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
    Backward result;

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();

    Tensor dq = ctx.empty("dq", MemoryClass::workspace, dy.dtype(), saved.q.shape());
    Tensor dk = ctx.empty("dk", MemoryClass::workspace, dy.dtype(), saved.k.shape());
    Tensor dv = ctx.empty("dv", MemoryClass::workspace, dy.dtype(), saved.v.shape());
    attention_core_backward(ctx, block.core, whole_sequence_inputs(block, saved.q, saved.k, saved.v),
                            std::move(saved.core), dout, {.dq = dq, .dk = dk, .dv = dv});
    saved.q = saved.k = saved.v = dout = Tensor();

    Tensor dlatent =
        ctx.empty("d gathered latent", MemoryClass::workspace, statistic_dtype(dy.dtype()), saved.latent.shape());
    sum_heads(ctx, "dk_pe over heads", dk.slice(2, n, r), dlatent.slice(1, config.kv_lora_rank, r));
    // Only now: the columns of dk_nope would stand idle through the core's peak.
    Tensor dkv = ctx.empty("d kv_b output", MemoryClass::workspace, dy.dtype(), {dk.size(0), dk.size(1), n + v});
    copy(ctx, "join dk_nope", dk.slice(2, 0, n), dkv.slice(2, 0, n));
    copy(ctx, "join dv", dv, dkv.slice(2, n, v));
    dk = dv = Tensor();
    const IndexRange my_heads = block.my_heads();
    up_project_backward(ctx, block.layer, saved.latent, my_heads, dkv, dlatent, result.gradients);
    dkv = saved.latent = Tensor();
    Tensor dlatent_local = scatter_sum_rows(ctx, block, "d latent", dlatent);
    dlatent = Tensor();

    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local),
                                 std::move(dlatent_local), std::move(dy), result.gradients);
    return result;
  }

 private:
  bool copy_values_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_laga(const Layout& layout) {
  const std::string v = layout.option("v", "copy");
  if (v != "copy" && v != "view") invalid_argument("laga: v={}; it takes v=copy or v=view", v);
  return std::make_unique<Laga>(v == "copy");
}

}  // namespace isomer
