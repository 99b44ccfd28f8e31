// laga: Latent All-Gather Attention. The latent rows are gathered, and keys and values up-projected from them for the
// rank's own heads.
//
//   tokens t = S/P, all heads                        all tokens S, heads h/P
//   x → q              ──all-to-all Q───────▶       q
//   x → ĉ|k_pe         ──all-gather latent──▶       ĉ|k_pe → k, v   (local up-projection)
//   y = x + W_o o      ◀──all-to-all O───────       o = attention(q, k, v)
//
// Backward: all-to-all dO, all-to-all dQ, reduce-scatter of the latent's gradient in float32. Each rank holds complete
// gradients of its own heads' rows of kv_b_proj. With a second axis, laga:P,ring:G, the figure is that of one group of
// P ranks with its tokens, and K and V of the rank's heads pass round the G groups (ring_attention.h).
//
// Options, how K and V are kept for the backward:
//   kv=copy (default)   K whole, V copied out of the up-projection's output, which then goes
//   kv=view             K whole, V a view of the up-projection's output, whose k_nope columns stay with it
//   kv=strided          the up-projection's output alone: the core reads k_nope and v out of it, k_pe apart
//   kv=rebuild          neither: up-projected again in the backward; so says recompute=up-projection
// v=copy and v=view are older names of the first two. recompute=attention drops the core's output and LSE.
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/heads.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

enum class KeptKeys : std::uint8_t { copy, view, strided, rebuild };

struct LagaSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;  // [S·batch, d + r], gathered
  Tensor q;       // [S·batch, h/P, n + r]
  Tensor k, v;    // [S·batch, h/P, n + r | v]; or
  Tensor kv;      // [S·batch, h/P, n + v], strided
  CoreSaved core;
  Tensor o;  // [T, h, v]
};

class Laga : public SequenceScheme {
 public:
  Laga(KeptKeys kept, bool keep_core) : kept_(kept), keep_core_(keep_core) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<LagaSaved>();
    FunctionScope scope(ctx);

    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->latent = gather_rows(ctx, block, "latent", latent, MemoryClass::saved);
    scope.release(std::move(latent));

    up_project(ctx, block, *saved, scope);
    Tensor out = core_forward(ctx, block, *saved);
    if (kept_ == KeptKeys::rebuild) release_keys(*saved, scope);
    if (!keep_core_) drop_core(saved->core, out);
    saved->o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, saved->o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<LagaSaved&>(*state);
    Backward result;
    FunctionScope scope(ctx);

    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();
    if (kept_ == KeptKeys::rebuild) up_project(ctx, block, saved, scope);

    Tensor dlatent;
    Tensor dq = is_strided(block) ? strided_backward(ctx, block, saved, dout, dlatent, result.gradients)
                                  : whole_backward(ctx, block, saved, dout, dlatent, result.gradients);
    saved.latent = Tensor();
    Tensor dlatent_local = scatter_sum_rows(ctx, block, "d latent", dlatent);
    dlatent = Tensor();

    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local),
                                 std::move(dlatent_local), std::move(dy), result.gradients);
    return result;
  }

 private:
  /// What passes round a ring is whole; elsewhere what is rebuilt need not be.
  bool is_strided(const SequenceBlock& block) const {
    if (kept_ == KeptKeys::strided && block.tokens.num_groups > 1) {
      invalid_argument("laga: kv=strided has no keys that could pass round a ring; use kv=copy or kv=rebuild");
    }
    return kept_ == KeptKeys::strided || (kept_ == KeptKeys::rebuild && block.tokens.num_groups == 1);
  }

  void up_project(RankContext& ctx, const SequenceBlock& block, LagaSaved& saved, FunctionScope& scope) const {
    const auto& config = block.layer.config;
    if (is_strided(block) || kept_ == KeptKeys::view) {
      const Tensor kv = up_project_forward(ctx, block.layer, saved.latent, block.my_heads(),
                                           kept_ == KeptKeys::rebuild ? MemoryClass::workspace : MemoryClass::saved);
      if (is_strided(block)) {
        saved.kv = kv;
        return;
      }
      saved.k = concatenate_keys(ctx, kv.slice(2, 0, config.qk_nope_head_dim), rope_keys(config, saved.latent),
                                 MemoryClass::saved);
      saved.v = kv.slice(2, config.qk_nope_head_dim, config.v_head_dim);
      return;
    }
    auto [k, v] = build_keys_values(ctx, block, saved.latent, scope);
    saved.k = std::move(k);
    saved.v = std::move(v);
  }

  static Tensor rope_keys(const ModelConfig& config, const Tensor& latent) {
    return latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim);
  }

  static void release_keys(LagaSaved& saved, FunctionScope& scope) {
    for (Tensor* tensor : {&saved.k, &saved.v, &saved.kv}) {
      if (*tensor) scope.release(std::move(*tensor));
    }
  }

  AttentionInputs strided_inputs(const SequenceBlock& block, const LagaSaved& saved) const {
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim;
    const Tensor k = saved.kv.slice(2, 0, n), v = saved.kv.slice(2, n, config.v_head_dim);
    if (r == 0) return whole_sequence_inputs(block, saved.q, k, v);
    return whole_sequence_inputs(block, saved.q.slice(2, 0, n), k, v, saved.q.slice(2, n, r),
                                 rope_keys(config, saved.latent).unflatten(1, {1, r}));
  }

  Tensor core_forward(RankContext& ctx, const SequenceBlock& block, LagaSaved& saved) const {
    if (!is_strided(block)) return group_attention_forward(ctx, block, saved.q, saved.k, saved.v, saved.core);
    return attention_core_forward(ctx, block.core, strided_inputs(block, saved), saved.core);
  }

  static Tensor empty_latent_gradient(RankContext& ctx, const Tensor& latent) {
    return ctx.empty("d gathered latent", MemoryClass::workspace, statistic_dtype(latent.dtype()), latent.shape());
  }

  /// Returns dq; makes dlatent.
  static Tensor whole_backward(RankContext& ctx, const SequenceBlock& block, LagaSaved& saved, Tensor& dout,
                               Tensor& dlatent, BlockGradients& gradients) {
    auto [dq, dk, dv] = group_attention_backward(ctx, block, saved.q, saved.k, saved.v, std::move(saved.core), dout);
    saved.q = saved.k = saved.v = dout = Tensor();
    dlatent = empty_latent_gradient(ctx, saved.latent);
    up_projection_gradients(ctx, block, saved.latent, std::move(dk), std::move(dv), dlatent, gradients);
    return dq;
  }

  /// The same where the core reads the up-projection's output, and writes its gradient in place.
  Tensor strided_backward(RankContext& ctx, const SequenceBlock& block, LagaSaved& saved, Tensor& dout, Tensor& dlatent,
                          BlockGradients& gradients) const {
    const auto& config = block.layer.config;
    const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
    if (is_dropped(saved.core)) core_forward(ctx, block, saved);
    Tensor dq = ctx.empty("dq", MemoryClass::workspace, dout.dtype(), saved.q.shape());
    Tensor dkv = ctx.empty("d kv_b output", MemoryClass::workspace, dout.dtype(), saved.kv.shape());
    dlatent = empty_latent_gradient(ctx, saved.latent);
    AttentionGradients g{.dq = dq.slice(2, 0, n), .dk = dkv.slice(2, 0, n), .dv = dkv.slice(2, n, v)};
    if (r > 0) {
      g.dq_rope = dq.slice(2, n, r);
      g.dk_rope = rope_keys(config, dlatent).unflatten(1, {1, r});
    }
    attention_core_backward(ctx, block.core, strided_inputs(block, saved), std::move(saved.core), dout, g);
    saved.q = saved.kv = dout = Tensor();
    up_project_backward(ctx, block.layer, saved.latent, block.my_heads(), dkv, dlatent, gradients);
    return dq;
  }

  KeptKeys kept_;
  bool keep_core_;
};

KeptKeys kept_keys_of(const Layout& layout) {
  const std::string v = layout.option("v", "copy");
  if (v != "copy" && v != "view") invalid_argument("laga: v={}; it takes v=copy or v=view", v);
  const std::string rebuilt = recompute_of(layout) == Recompute::up_projection ? "rebuild" : v;
  const std::string kv = layout.option("kv", rebuilt);
  if (kv == "copy") return KeptKeys::copy;
  if (kv == "view") return KeptKeys::view;
  if (kv == "strided") return KeptKeys::strided;
  if (kv == "rebuild") return KeptKeys::rebuild;
  invalid_argument("laga: kv={}; it takes kv=copy, view, strided or rebuild", kv);
}

}  // namespace

std::unique_ptr<SequenceScheme> make_laga(const Layout& layout) {
  const KeptKeys kept = kept_keys_of(layout);
  if (kept == KeptKeys::strided && layout.axes.size() > 1 && layout.axes[1].name == "ring") {
    invalid_argument("layout '{}': kv=strided has no keys that could pass round a ring; use kv=copy or kv=rebuild",
                     to_string(layout));
  }
  return std::make_unique<Laga>(kept, recompute_of(layout) != Recompute::attention);
}

}  // namespace isomer
