// latent-ring: latent rows pass round, and keys and values are rebuilt from each block as it passes
// (latent_attention.h). Alone, latent-ring:P, a rank keeps all heads of its tokens; with inner ranks,
// laga:P,latent-ring:G, a group of P ranks first exchanges as under laga, and the group's gathered latent passes round
// the G groups.
//
//   tokens t = S/(P·G), all heads                    the group's S/G tokens, heads h/P
//   x → q              ──all-to-all Q───────▶       q
//   x → ĉ|k_pe         ──all-gather latent──▶       ĉ|k_pe  ──▶ group g+1 ──▶ … , G − 1 hops
//   y = x + W_o o      ◀──all-to-all O───────       o = Σ over blocks that pass: rebuild K, V; attention; merge by LSE
//
// Backward: the latent passes round again, behind it the float32 sums of its gradient, which end at their owner; then
// all-to-all dQ and, inside the group, reduce-scatter of the latent's gradient.
//
// Options: rows=N, rows whose keys and values stand at once; recompute=attention drops the core's output and LSE.
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/latent_attention.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"
#include "parallel/sequence/ring_pass.h"

namespace isomer {

namespace {

struct LatentRingSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;  // [rows of the group, d + r]
  Tensor q;       // [rows of the group, h/P, n + r]
  CoreSaved core;
  Tensor o;  // [T, h, v]; where there is one inner rank, the core's output
};

class LatentRing : public SequenceScheme {
 public:
  LatentRing(std::int64_t block_rows, bool keep_core) : block_rows_(block_rows), keep_core_(keep_core) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<LatentRingSaved>();
    FunctionScope scope(ctx);
    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    saved->q = tokens_to_heads(ctx, block, "q", q, MemoryClass::saved);
    scope.release(std::move(q));
    saved->latent = gather_rows(ctx, block, "latent", latent, MemoryClass::saved);
    scope.release(std::move(latent));

    Tensor out = attend(ctx, block, *saved);
    if (!keep_core_) drop_core(saved->core, out);
    Tensor o = heads_to_tokens(ctx, block, "o", out, MemoryClass::saved);
    scope.release(std::move(out));
    Tensor y = output_forward(ctx, block.layer, o, x);
    if (keep_core_ || !is_alone(block)) {
      saved->o = std::move(o);
    } else {
      scope.release(std::move(o));
    }
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<LatentRingSaved&>(*state);
    Backward result;
    if (!saved.o) saved.o = attend(ctx, block, saved);
    Tensor dout_local = output_backward(ctx, block.layer, std::move(saved.o), dy, result.gradients);
    Tensor dout = tokens_to_heads(ctx, block, "dO", dout_local, MemoryClass::communication);
    dout_local = Tensor();
    if (is_dropped(saved.core)) attend(ctx, block, saved);

    LatentAttentionBackward attention(ctx, block, std::move(saved.q), std::move(saved.core), std::move(dout),
                                      rows_a_block(block), result.gradients);
    Tensor dlatent =
        pass_round_backward(ctx, block, {{"latent"}, {saved.latent}},
                            [&](const std::vector<Tensor>& rows, int group, const std::vector<Tensor>& sums) {
                              attention.add(latent_of(block, rows[0], group), sums[0]);
                            })
            .front();
    saved.latent = Tensor();
    Tensor dq = attention.finish();
    Tensor dlatent_local = scatter_sum_rows(ctx, block, "d latent", dlatent);
    dlatent = Tensor();
    Tensor dq_local = heads_to_tokens(ctx, block, "dQ", dq, MemoryClass::communication);
    dq = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq_local),
                                 std::move(dlatent_local), std::move(dy), result.gradients);
    return result;
  }

 private:
  static bool is_alone(const SequenceBlock& block) { return block.tokens.ranks_per_group == 1; }

  std::int64_t rows_a_block(const SequenceBlock& block) const {
    return rebuilt_rows(block.layer.config, block.my_heads().count, block_rows_);
  }

  static LatentRows latent_of(const SequenceBlock& block, const Tensor& rows, int group) {
    return {.rows = rows, .kv = {}, .positions = block.tokens.group_positions(group)};
  }

  /// Fills saved.core and returns its output.
  Tensor attend(RankContext& ctx, const SequenceBlock& block, LatentRingSaved& saved) const {
    LatentAttention attention(ctx, block, saved.q, rows_a_block(block));
    pass_round(ctx, block, {{"latent"}, {saved.latent}},
               [&](const std::vector<Tensor>& rows, int group) { attention.add(latent_of(block, rows[0], group)); });
    saved.core = attention.finish();
    return saved.core.out;
  }

  std::int64_t block_rows_;  // 0: chosen by shape
  bool keep_core_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_latent_ring(const Layout& layout) {
  return std::make_unique<LatentRing>(block_rows_of(layout), recompute_of(layout) != Recompute::attention);
}

}  // namespace isomer
