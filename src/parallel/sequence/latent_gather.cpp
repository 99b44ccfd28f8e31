// latent-gather: only latent rows travel. Each rank keeps the queries of its tokens for all heads, gathers everybody's
// latent rows, and rebuilds keys and values block by block inside the attention loop. No all-to-all, so ranks may
// exceed heads; the price is the up-projection of all visible tokens on every rank.
//
//   rank p of P, tokens t = S/P (parts p and 2P−1−p), all heads
//   x → q, ĉ|k_pe      ──all-gather latent──▶       ĉ|k_pe of all S tokens; own rows are worked on meanwhile
//   o = Σ over blocks of rows: [k_nope | v] = W_kv_b ĉ, attention, merged by LSE         y = x + W_o o
//
// Backward: the blocks are rebuilt once more; the latent's gradient is summed over them in float32, and
// reduce-scattered.
//
// Options: kv=streamed (default) or kv=kept, which up-projects once and keeps the output for the backward; rows=N, rows
// of a block (latent_attention.h chooses by shape); recompute=attention drops o and its LSE.
#include "comm/communicator.h"
#include "kernels/elementwise.h"
#include "parallel/sequence/exchange.h"
#include "parallel/sequence/latent_attention.h"
#include "parallel/sequence/recompute.h"
#include "parallel/sequence/ring_attention.h"

namespace isomer {

namespace {

struct LatentGatherSaved : SequenceScheme::Saved {
  ProjectSaved project;
  Tensor latent;   // [S·batch, d + r], gathered: rows of rank 0, of rank 1, …
  Tensor kv;       // kept: [S·batch, h, n + v]
  Tensor q;        // [T, h, n + r]
  CoreSaved core;  // its output [T, h, v] is the input of W_o
};

class LatentGather : public SequenceScheme {
 public:
  LatentGather(bool keep_kv, std::int64_t block_rows, bool keep_core)
      : keep_kv_(keep_kv), block_rows_(block_rows), keep_core_(keep_core) {}

  Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const override {
    auto saved = std::make_unique<LatentGatherSaved>();
    FunctionScope scope(ctx);
    auto [q, latent] = project_forward(ctx, block.layer, x, saved->project);
    q.reclassify(MemoryClass::saved);
    saved->q = std::move(q);

    GatheredRows gathered = issue_gather_over_groups(ctx, block, "latent", latent, MemoryClass::saved);
    saved->latent = gathered.rows;
    if (keep_kv_) {
      gathered.work.wait();
      scope.release(std::move(latent));
      saved->kv = up_project_forward(ctx, block.layer, saved->latent, block.my_heads(), MemoryClass::saved);
    }
    Tensor o = attend(ctx, block, *saved, latent, gathered.work, scope);
    if (!keep_core_) drop_core(saved->core, o);
    Tensor y = output_forward(ctx, block.layer, o, x);
    return {y, std::move(saved)};
  }

  Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> state,
                    Tensor dy) const override {
    auto& saved = static_cast<LatentGatherSaved&>(*state);
    Backward result;
    if (is_dropped(saved.core)) {
      FunctionScope scope(ctx);
      Work none;
      Tensor no_rows;
      attend(ctx, block, saved, no_rows, none, scope);
    }
    Tensor dout = output_backward(ctx, block.layer, saved.core.out, dy, result.gradients);

    Tensor dlatent =
        ctx.zeros("d gathered latent", MemoryClass::workspace, statistic_dtype(dy.dtype()), saved.latent.shape());
    LatentAttentionBackward attention(ctx, block, std::move(saved.q), std::move(saved.core), std::move(dout),
                                      rows_a_block(block), result.gradients);
    for_groups(block, [&](int group) {
      const IndexRange rows = rows_of_group(block, group);
      attention.add(latent_of(block, saved, group), dlatent.slice(0, rows.begin, rows.count));
    });
    saved.latent = saved.kv = Tensor();
    Tensor dq = attention.finish();
    Tensor dlatent_local = scatter_sum_over_groups(ctx, block, "d latent", dlatent);
    dlatent = Tensor();
    result.dx = project_backward(ctx, block.layer, std::move(saved.project), std::move(dq), std::move(dlatent_local),
                                 std::move(dy), result.gradients);
    return result;
  }

 private:
  std::int64_t rows_a_block(const SequenceBlock& block) const {
    return rebuilt_rows(block.layer.config, block.layer.heads(), block_rows_);
  }

  /// Own rows first, as they need no wait, then those of the groups before, in the order of a ring.
  template <class Body>
  static void for_groups(const SequenceBlock& block, Body&& body) {
    const int groups = block.tokens.num_groups;
    for (int step = 0; step < groups; ++step) body((block.group() + groups - step) % groups);
  }

  static LatentRows latent_of(const SequenceBlock& block, const LatentGatherSaved& saved, int group) {
    const IndexRange rows = rows_of_group(block, group);
    return {.rows = saved.latent.slice(0, rows.begin, rows.count),
            .kv = saved.kv ? saved.kv.slice(0, rows.begin, rows.count) : Tensor(),
            .positions = block.tokens.group_positions(group)};
  }

  /// Fills saved.core. `own` (released when its use is over) stands for the rank's rows while the others are under way.
  Tensor attend(RankContext& ctx, const SequenceBlock& block, LatentGatherSaved& saved, Tensor& own, Work& under_way,
                FunctionScope& scope) const {
    LatentAttention attention(ctx, block, saved.q, rows_a_block(block));
    for_groups(block, [&](int group) {
      LatentRows latent = latent_of(block, saved, group);
      if (own) latent.rows = own;
      attention.add(latent);
      if (own) scope.release(std::move(own));
      under_way.wait();
    });
    saved.core = attention.finish();
    return saved.core.out;
  }

  bool keep_kv_;
  std::int64_t block_rows_;  // 0: chosen by shape
  bool keep_core_;
};

}  // namespace

std::unique_ptr<SequenceScheme> make_latent_gather(const Layout& layout) {
  const std::string kv = layout.option("kv", "streamed");
  if (kv != "streamed" && kv != "kept") invalid_argument("latent-gather: kv={}; it takes kv=streamed or kv=kept", kv);
  return std::make_unique<LatentGather>(kv == "kept", block_rows_of(layout),
                                        recompute_of(layout) != Recompute::attention);
}

}  // namespace isomer
