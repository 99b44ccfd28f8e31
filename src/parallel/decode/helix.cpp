// helix: the cache split over the sequence (KVP slices) and heads over TPA columns; then the same N = KVP·TPA ranks as
// TPF × EP for the FFN (Helix, arXiv 2507.07120, section 2; model-math: Helix). Exact. rank = slice · TPA + column.
//
//   x, whole on every rank
//   q of the column's heads, ĉ|k_pe (K, V)   on every slice; q=gather: h/N heads each ── all-gather ──▶ the column's
//   the new row → the slice that owns its position
//   attention over the slice: partial õ | lse ── all-to-all over heads, inside the column ──▶ h/N heads of all slices
//   merge by lse → W_UV (wuv=before: ahead of the exchange), W_o of h/N heads → y = x + all-reduce over N
//   FFN as TPF × EP: all-reduce over N (experts=gather: all-reduce over TPF ── all-gather over EP ──▶ sum)
//
// HOP-B: the exchange of one sequence is under way while the next one's attention is computed. Prefill is the same with
// keys and values up-projected, v a head.
#include "parallel/decode/slices.h"

namespace isomer {

namespace {

class HelixScheme : public StepScheme {
 public:
  explicit HelixScheme(const SchemeArguments& a)
      : layout_(a.layout), config_(a.config), slices_(a.comm, a.layout, a.config) {
    const DecodeShards& s = layout_.shards;
    if (!s.gather_experts) return;
    tpf_ = a.comm.split(a.comm.rank() / s.tpf, a.comm.rank() % s.tpf);
    ep_ = a.comm.split(a.comm.rank() % s.tpf, a.comm.rank() / s.tpf);
  }

  WeightSplit explicit_split(int rank) const override {
    const DecodeShards& s = layout_.shards;
    return {.heads = column_of_rank(layout_, config_, rank),
            .ffn_parts = s.group(),
            .ffn_part = rank,
            .expert_parts = s.ep};
  }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override;
  Tensor ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override;

 private:
  IndexRange own() const { return slices_.own(slices_.slice()); }
  /// Caches the new rows; queries of the column's heads, absorbed in decode: [T, column's heads, w_k].
  Tensor queries(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
  Tensor gathered_queries(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
  /// Partial results of all slices for the rank's own heads, merged: [T, own, w].
  Tensor exchanged(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const;
  void issue(const Tensor& rows, const Tensor& received, std::vector<Work>& works) const;

  DecodeLayout layout_;
  const ModelConfig& config_;
  Slices slices_;
  std::unique_ptr<Communicator> tpf_, ep_;  // experts=gather
};

Tensor HelixScheme::queries(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  if (layout_.shards.gather_queries && slices_.num_slices() > 1) return gathered_queries(ctx, block, x);
  const Tensor q = project_and_cache(ctx, block, x);
  return block.step.explicit_form ? q : absorb(ctx, block, q);
}

/// The rows of a projection that belong to some of its heads.
Tensor rows_of_heads(const Tensor& weight, IndexRange heads, std::int64_t width) {
  return weight ? weight.slice(0, heads.begin * width, heads.count * width) : weight;
}

Tensor HelixScheme::gathered_queries(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const IndexRange mine = own();
  const std::int64_t width = block.is_latent() ? config_.qk_head_dim() : config_.head_dim;
  ModelConfig local = block.part().local;
  local.num_attention_heads = mine.count;
  AttentionWeights weights = block.weights().attention;
  for (Tensor* weight : {&weights.q_proj, &weights.q_bias, &weights.q_b_proj}) {
    *weight = rows_of_heads(*weight, mine, width);
  }
  const Projections p = project(ctx, block, {local, weights, block.step.rope}, x);
  store_rows(ctx, block, p.keys, p.values);
  const bool absorbed = !block.step.explicit_form, before = absorbed && layout_.shards.absorb_before;
  const Tensor q = before ? absorb(ctx, block, p.q, mine.begin) : p.q;
  const Tensor all = ctx.empty("q of the column", MemoryClass::communication, q.dtype(),
                               {q.size(0), slices_.heads().query.count, q.size(2)});
  std::vector<Tensor> receive;
  for (int slice = 0; slice < slices_.num_slices(); ++slice) {
    receive.push_back(all.slice(1, slices_.own(slice).begin, slices_.own(slice).count));
  }
  slices_.of_column().all_gather("q", q, receive);
  return absorbed && !before ? absorb(ctx, block, all) : all;
}

void HelixScheme::issue(const Tensor& rows, const Tensor& received, std::vector<Work>& works) const {
  std::vector<Tensor> send, receive;
  send.reserve(static_cast<std::size_t>(slices_.num_slices()));
  receive.reserve(send.capacity());
  for (int slice = 0; slice < slices_.num_slices(); ++slice) {
    send.push_back(rows.slice(1, slices_.own(slice).begin, slices_.own(slice).count));
    receive.push_back(received.select(0, slice));
  }
  works.push_back(slices_.of_column().issue_all_to_all("partial o and lse", send, receive));
}

Tensor HelixScheme::exchanged(RankContext& ctx, const DecodeBlock& block, const Tensor& q) const {
  const bool before = layout_.shards.values_before;
  const int num_slices = slices_.num_slices();
  if (num_slices == 1) return attend_slice(ctx, block, q, before).out;
  Tensor received;
  std::vector<Work> works;
  const auto exchange = [&](const DecodeBlock& part, std::int64_t first_row) {
    const std::int64_t rows = part.step.num_rows;
    const PartialAttention partial = attend_slice(ctx, part, q.slice(0, first_row, rows), before);
    if (!received) received = packed_of_slices(ctx, num_slices, q.size(0), own().count, partial);
    issue(packed(ctx, partial), received.slice(1, first_row, rows), works);
  };
  if (block.step.explicit_form || !layout_.hop_b) {
    exchange(block, 0);
  } else {
    for (const StepSequence& s : block.step.sequences) {
      const DecodeStep alone{.sequences = {{s.sequence, 0, s.positions}}, .num_rows = s.positions.count, .rope = {}};
      exchange({block.model, block.index, alone, block.cache, block.comm}, s.first_row);
    }
  }
  for (Work& work : works) work.wait();
  observe(ctx, block, "o and lse of all slices", received);
  return merged(ctx, received);
}

Tensor HelixScheme::attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const Tensor core = exchanged(ctx, block, queries(ctx, block, x));
  const bool are_values = block.step.explicit_form || layout_.shards.values_before;
  const Tensor values = are_values ? core : values_of(ctx, block, core, own().begin);
  AttentionWeights weights = block.weights().attention;
  const std::int64_t v = config_.value_head_dim();
  weights.o_proj = weights.o_proj.slice(1, own().begin * v, own().count * v);
  return join_heads(ctx, block, weights, values, x);
}

Tensor HelixScheme::ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const DecodeShards& s = layout_.shards;
  const bool moe = block.weights().is_moe();
  if (!moe || !s.gather_experts || s.ep == 1) return decode_ffn(ctx, block, x);
  const Tensor mine = ffn_part(ctx, block, x);
  tpf_->all_reduce("ffn output", mine);
  const Tensor all =
      ctx.empty("output of all experts", MemoryClass::communication, mine.dtype(), {s.ep, mine.size(0), mine.size(1)});
  std::vector<Tensor> receive;
  for (int group = 0; group < s.ep; ++group) receive.push_back(all.select(0, group));
  ep_->all_gather("expert outputs", mine, receive);
  for (int group = 1; group < s.ep; ++group)
    add(ctx, "sum of experts", receive[0], receive[static_cast<std::size_t>(group)], receive[0]);
  add_residual(ctx, block, receive[0], x);
  return receive[0];
}

}  // namespace

std::unique_ptr<StepScheme> make_helix(const SchemeArguments& arguments) {
  return std::make_unique<HelixScheme>(arguments);
}

}  // namespace isomer
