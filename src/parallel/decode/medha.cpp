// medha: the same sliced cache as helix, but all that follows attention stands on the ranks of slice 0, the root: W_o
// and the FFN are cut over its TPA columns, and the other slices wait (the baseline of Helix; nothing overlaps). Exact.
// rank = slice · TPA + column.
//
//   x → q of the column's heads, ĉ|k_pe (K, V) → attention over the slice: partial õ | lse
//   slices 1 …  ── send ──▶  root: merge by lse → W_UV, W_o → y = x + all-reduce over TPA → FFN → all-reduce over TPA
//   slices 1 …  ◀── send ──  x of the next layer
#include "kernels/attention_parts.h"
#include "parallel/decode/slices.h"

namespace isomer {

namespace {

class MedhaScheme : public StepScheme {
 public:
  explicit MedhaScheme(const SchemeArguments& a)
      : layout_(a.layout), config_(a.config), slices_(a.comm, a.layout, a.config) {}

  WeightSplit explicit_split(int rank) const override {
    const DecodeShards& s = layout_.shards;
    return {.heads = column_of_rank(layout_, config_, rank),
            .ffn_parts = s.tpa,
            .ffn_part = rank % s.tpa,
            .expert_parts = s.ep};
  }

  /// Beside the root, x itself: ffn() brings what comes of it.
  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    const Tensor q = project_and_cache(ctx, block, x);
    const bool before = layout_.shards.values_before, is_explicit = block.step.explicit_form;
    const PartialAttention partial = attend_slice(ctx, block, is_explicit ? q : absorb(ctx, block, q), before);
    if (slices_.slice() > 0) {
      slices_.of_column().issue_send("partial o and lse", packed(ctx, partial), 0).wait();
      return x;
    }
    const Tensor core = of_all_slices(ctx, partial);
    const Tensor values = is_explicit || before ? core : values_of(ctx, block, core);
    return join_heads(ctx, at_root(block), values, x);
  }

  Tensor ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    if (slices_.slice() > 0) {
      Tensor next = ctx.empty("x from the root", MemoryClass::communication, x.dtype(), x.shape());
      slices_.of_column().issue_receive("x", next, 0).wait();
      return next;
    }
    Tensor next = decode_ffn(ctx, at_root(block), x);
    for (int slice = 1; slice < slices_.num_slices(); ++slice) slices_.of_column().issue_send("x", next, slice).wait();
    return next;
  }

 private:
  /// The layer among the root's columns.
  DecodeBlock at_root(const DecodeBlock& block) const {
    return {block.model, block.index, block.step, block.cache, slices_.of_slice()};
  }
  Tensor of_all_slices(RankContext& ctx, const PartialAttention& mine) const {
    if (slices_.num_slices() == 1) return mine.out;
    const Tensor received = packed_of_slices(ctx, slices_.num_slices(), mine.out.size(0), mine.out.size(1), mine);
    for (int slice = 1; slice < slices_.num_slices(); ++slice) {
      slices_.of_column().issue_receive("partial o and lse", received.select(0, slice), slice).wait();
    }
    pack_partial_attention(ctx, mine.out, mine.lse, received.select(0, 0));
    return merged(ctx, received);
  }

  DecodeLayout layout_;
  const ModelConfig& config_;
  Slices slices_;
};

}  // namespace

std::unique_ptr<StepScheme> make_medha(const SchemeArguments& arguments) {
  return std::make_unique<MedhaScheme>(arguments);
}

}  // namespace isomer
