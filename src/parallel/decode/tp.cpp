// tp: heads split over the ranks, the cache whole on each (latent rows; of grouped-query attention the KV heads of the
// rank's query heads, a copy where ranks exceed them). Today's standard.
//
//   x, all heads' inputs on every rank            heads h/N
//   x → q of h/N heads, ĉ|k_pe of all tokens  →  attention over the whole cache  →  W_o of h/N heads
//   y = x + Σ ranks                ◀── all-reduce B·D ──
#include "parallel/decode/stages.h"

namespace isomer {

namespace {

class TensorParallelScheme : public StepScheme {
 public:
  explicit TensorParallelScheme(const DecodeLayout& layout) : layout_(layout) {}
  WeightSplit explicit_split(int rank) const override { return even_split(layout_, rank, true); }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    const Tensor q = project_and_cache(ctx, block, x);
    if (block.step.explicit_form) {
      const auto rows_here = [&](const StepSequence& sequence, IndexRange positions) {
        return load_rows(ctx, block, sequence, positions);
      };
      return join_heads(ctx, block, attend_prefix(ctx, block, q, rows_here).out, x);
    }
    const PartialAttention core = attend_cache(ctx, block, absorb(ctx, block, q));
    return join_heads(ctx, block, values_of(ctx, block, core.out), x);
  }

 private:
  DecodeLayout layout_;
};

}  // namespace

std::unique_ptr<StepScheme> make_tp(const SchemeArguments& arguments) {
  return std::make_unique<TensorParallelScheme>(arguments.layout);
}

}  // namespace isomer
