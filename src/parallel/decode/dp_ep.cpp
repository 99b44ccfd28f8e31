// dp-ep: data-parallel attention, expert-parallel FFN (today's choice for short contexts). Every rank has sequences of
// its own, whole, with all heads; experts are dealt over all ranks. Exact.
//
//   own rows → attention of all heads over the own cache → x                                nothing sent
//   router → each row to the ranks that have an expert of it   ── all-to-all, uneven ──▶   their experts' weighted sums
//   y = x + shared experts + Σ over those ranks                ◀── all-to-all, uneven ──
//
// A dense FFN, and experts cut by width (tpf), take all rows: all-gather ──▶ the rank's columns ── reduce-scatter ──▶.
// A receiver asks the router for itself, which stands on every rank, so rows travel alone.
#include <numeric>

#include "comm/communicator.h"
#include "kernels/elementwise.h"
#include "kernels/head_ops.h"
#include "layers/ffn_parts.h"
#include "parallel/decode/stages.h"

namespace isomer {

namespace {

/// The rows that a rank sends to each, and how many it gets from each.
struct Dispatch {
  std::vector<std::vector<std::int32_t>> rows;  // [ranks]: rows of the own x
  std::vector<std::int64_t> incoming;           // [ranks]
};

class DataParallelScheme : public StepScheme {
 public:
  explicit DataParallelScheme(const SchemeArguments& a)
      : layout_(a.layout), config_(a.config), comm_(a.comm), alone_(a.comm.split(a.comm.rank(), 0)) {}

  WeightSplit explicit_split(int rank) const override {
    const DecodeShards& s = layout_.shards;
    return {.ffn_parts = s.devices(), .ffn_part = rank, .whole_shared_experts = s.ep > 1, .expert_parts = s.ep};
  }

  Tensor attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    if (x.size(0) == 0) return x;
    const DecodeBlock own{block.model, block.index, block.step, block.cache, *alone_};
    const Tensor q = project_and_cache(ctx, own, x);
    if (block.step.explicit_form) {
      const auto rows_here = [&](const StepSequence& sequence, IndexRange positions) {
        return load_rows(ctx, own, sequence, positions);
      };
      return join_heads(ctx, own, attend_prefix(ctx, own, q, rows_here).out, x);
    }
    return join_heads(ctx, own, values_of(ctx, own, attend_cache(ctx, own, absorb(ctx, own, q)).out), x);
  }

  Tensor ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const override {
    const bool routed = block.weights().is_moe() && layout_.shards.ep > 1;
    Tensor y = routed ? routed_experts(ctx, block, x) : columns(ctx, block, x);
    if (x.size(0) > 0) add_residual(ctx, block, y, x);
    return y;
  }

 private:
  Tensor columns(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
  Tensor routed_experts(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
  Dispatch dispatch_of(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm) const;
  std::vector<std::vector<std::int32_t>> rows_by_rank(const Routing& routing) const;
  Tensor own_experts_of(RankContext& ctx, const DecodeBlock& block, const Tensor& rows) const;

  DecodeLayout layout_;
  const ModelConfig& config_;
  Communicator& comm_;
  std::unique_ptr<Communicator> alone_;
};

/// [rows, D] cut into as many pieces, one behind the other.
std::vector<Tensor> pieces(const Tensor& rows, const std::vector<std::int64_t>& counts) {
  std::vector<Tensor> cut;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    cut.push_back(rows.slice(0, begin, count));
    begin += count;
  }
  return cut;
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

Tensor DataParallelScheme::columns(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const std::vector<std::int64_t>& counts = block.step.rows_of_group;
  const Tensor all = ctx.empty("x of all ranks", MemoryClass::communication, x.dtype(), {sum_of(counts), x.size(1)});
  comm_.all_gather("ffn rows", x, pieces(all, counts));
  const Tensor part = ffn_part(ctx, block, all);
  Tensor y = ctx.empty("ffn of own rows", MemoryClass::workspace, x.dtype(), x.shape());
  comm_.reduce_scatter("ffn output", pieces(part, counts), y);
  return y;
}

/// Rows, increasing, that have an expert on each rank.
std::vector<std::vector<std::int32_t>> DataParallelScheme::rows_by_rank(const Routing& routing) const {
  const int ranks = comm_.size();
  const std::int64_t experts = config_.moe.n_routed_experts / ranks;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(ranks));
  for (std::int64_t slot = 0; slot < routing.num_tokens * routing.top_k; ++slot) {
    const auto row = static_cast<std::int32_t>(slot / routing.top_k);
    auto& of_rank = rows[static_cast<std::size_t>(routing.experts[static_cast<std::size_t>(slot)] / experts)];
    if (of_rank.empty() || of_rank.back() != row) of_rank.push_back(row);
  }
  return rows;
}

Dispatch DataParallelScheme::dispatch_of(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm) const {
  const auto ranks = static_cast<std::size_t>(comm_.size());
  Dispatch dispatch{.rows = std::vector<std::vector<std::int32_t>>(ranks),
                    .incoming = std::vector<std::int64_t>(ranks)};
  if (x_norm.size(0) > 0) dispatch.rows = rows_by_rank(route(ctx, config_, block.weights().moe, x_norm, {}).routing);
  if (ctx.dry_run()) {  // every rank's routing is known beforehand
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const Routing routing = given_routing({.kind = RoutingSource::Kind::balanced}, block.step.rows_of_group[rank],
                                            config_.moe.num_experts_per_tok, config_.moe.n_routed_experts);
      dispatch.incoming[rank] =
          static_cast<std::int64_t>(rows_by_rank(routing)[static_cast<std::size_t>(comm_.rank())].size());
    }
  }
  const Tensor counts = ctx.empty("row counts", MemoryClass::communication, DType::f32, {comm_.size(), comm_.size()});
  const Tensor mine = counts.select(0, comm_.rank());
  if (!ctx.dry_run()) {
    for (std::size_t rank = 0; rank < ranks; ++rank)
      mine.data<float>()[rank] = static_cast<float>(dispatch.rows[rank].size());
  }
  std::vector<Tensor> receive;
  for (int rank = 0; rank < comm_.size(); ++rank) receive.push_back(counts.select(0, rank));
  comm_.all_gather("row counts", mine, receive);
  if (!ctx.dry_run()) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      dispatch.incoming[rank] = static_cast<std::int64_t>(receive[rank].data<float>()[comm_.rank()]);
    }
  }
  return dispatch;
}

/// The weighted sum of those of each row's experts that stand here.
Tensor DataParallelScheme::own_experts_of(RankContext& ctx, const DecodeBlock& block, const Tensor& rows) const {
  if (rows.size(0) == 0) return rows;
  LayerWeights weights = block.weights();
  weights.moe.shared_experts = {};
  FfnSaved dropped;
  return moe_forward(ctx, {config_, weights}, rows, Tensor(), {}, dropped);
}

Tensor DataParallelScheme::routed_experts(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const DType dtype = x.dtype();
  const Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, dtype, x.shape());
  if (x.size(0) > 0) {
    const Tensor rstd = ctx.empty("rstd post_attention", MemoryClass::workspace, statistic_dtype(dtype), {x.size(0)});
    rms_norm_forward(ctx, "post_attention_layernorm", x, block.weights().post_attention_layernorm, config_.rms_norm_eps,
                     x_norm, rstd);
  }
  const Dispatch dispatch = dispatch_of(ctx, block, x_norm);
  std::vector<std::int64_t> outgoing;
  std::vector<std::int32_t> order;  // rows as they are sent, rank by rank
  for (const auto& rows : dispatch.rows) {
    outgoing.push_back(static_cast<std::int64_t>(rows.size()));
    order.insert(order.end(), rows.begin(), rows.end());
  }
  const auto make = [&](std::string_view name, std::int64_t rows) {
    return ctx.empty(name, MemoryClass::communication, dtype, {rows, x.size(1)});
  };
  const Tensor sent = make("rows to experts", sum_of(outgoing)),
               got = make("rows for own experts", sum_of(dispatch.incoming));
  if (!order.empty()) embedding_rows(ctx, "expert rows", x_norm, order, 1, sent);
  comm_.all_to_all("dispatch", pieces(sent, outgoing), pieces(got, dispatch.incoming));
  const Tensor results = own_experts_of(ctx, block, got), back = make("rows back from experts", sum_of(outgoing));
  comm_.all_to_all("combine", pieces(results, dispatch.incoming), pieces(back, outgoing));
  const Tensor sum = ctx.zeros("sum of experts", MemoryClass::workspace, statistic_dtype(dtype), x.shape());
  if (!order.empty()) embedding_scatter(ctx, "sum of experts", back, order, 1, sum);
  const Tensor y = as_dtype(ctx, "sum of experts", sum, dtype);
  const MlpWeights& shared = block.weights().moe.shared_experts;
  if (x.size(0) == 0 || !shared.gate_proj) return y;
  FfnSaved dropped;
  add(ctx, "shared experts", y, swiglu_forward(ctx, "shared ", shared, x_norm, dropped.gate, dropped.up), y);
  return y;
}

}  // namespace

std::unique_ptr<StepScheme> make_dp_ep(const SchemeArguments& arguments) {
  return std::make_unique<DataParallelScheme>(arguments);
}

}  // namespace isomer
