// dp-ep: data-parallel attention, expert-parallel FFN (today's choice for short contexts). Every rank has sequences of
// its own, whole, with all heads; experts are dealt over all ranks. Exact.
//
//   own rows → attention of all heads over the own cache → x                                nothing sent
//   router → each row to the ranks that have an expert of it   ── all-to-all, uneven ──▶   their experts' weighted sums
//   y = x + shared experts + Σ over those ranks                ◀── all-to-all, uneven ──
//
// A dense FFN, and experts cut by width (tpf), take all rows: all-gather ──▶ the rank's columns ── reduce-scatter ──▶.
// A receiver asks the router for itself, which stands on every rank, so rows travel alone; how many come is told ahead,
// in one number a peer.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "comm/communicator.h"
#include "kernels/elementwise.h"
#include "kernels/head_ops.h"
#include "layers/ffn_parts.h"
#include "parallel/decode/stages.h"

namespace isomer {

namespace {

/// What a rank sends to each, and gets from each.
struct Dispatch {
  std::vector<std::vector<std::int32_t>> rows;  // [ranks]: rows of the own x
  std::vector<std::int64_t> incoming;           // [ranks]: numbers of rows
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
  Tensor normed(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const;
  Routing routing_of(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm) const;
  Routing incoming_routing(const DecodeBlock& block) const;
  std::vector<std::vector<std::int32_t>> rows_by_rank(const Routing& routing) const;
  Dispatch dispatch_of(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm) const;
  Tensor own_experts_of(RankContext& ctx, const DecodeBlock& block, const Tensor& rows) const;
  void add_shared_experts(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm, const Tensor& y) const;

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

/// Shows the choice, [rows, experts a token] numbers of experts, as "layer.N.experts"; a dry run has none to show.
void observe_experts(RankContext& ctx, const DecodeBlock& block, const Routing& routing) {
  if (ctx.dry_run()) return;
  const Tensor experts = Tensor::unrecorded("experts", DType::f32, {routing.num_tokens, routing.top_k});
  std::copy(routing.experts.begin(), routing.experts.end(), experts.data<float>());
  observe(ctx, block, "experts", experts);
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

Tensor DataParallelScheme::normed(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  Tensor x_norm = ctx.empty("x normed", MemoryClass::workspace, x.dtype(), x.shape());
  if (x.size(0) == 0) return x_norm;
  const Tensor rstd = ctx.empty("rstd post_attention", MemoryClass::workspace, statistic_dtype(x.dtype()), {x.size(0)});
  rms_norm_forward(ctx, "post_attention_layernorm", x, block.weights().post_attention_layernorm, config_.rms_norm_eps,
                   x_norm, rstd);
  return x_norm;
}

/// Each row by itself: products of another number of rows may round otherwise, and sender and receiver must choose the
/// same experts where two are close.
Routing DataParallelScheme::routing_of(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm) const {
  Routing all{.num_tokens = x_norm.size(0), .top_k = config_.moe.num_experts_per_tok};
  for (std::int64_t row = 0; row < all.num_tokens; ++row) {
    const Routing one = route(ctx, config_, block.weights().moe, x_norm.slice(0, row, 1), {}).routing;
    all.experts.insert(all.experts.end(), one.experts.begin(), one.experts.end());
  }
  return all;
}

/// A dry run: of the rows that come to this rank.
Routing DataParallelScheme::incoming_routing(const DecodeBlock& block) const {
  Routing incoming{.top_k = config_.moe.num_experts_per_tok};
  for (int rank = 0; rank < comm_.size(); ++rank) {
    const std::int64_t rows = block.step.rows_of_group[static_cast<std::size_t>(rank)];
    const Routing theirs = dry_routing(config_, block.index, rank, rows);
    const std::vector<std::vector<std::int32_t>> visits = rows_by_rank(theirs);
    for (const std::int32_t row : visits[static_cast<std::size_t>(comm_.rank())]) {
      const auto first = theirs.experts.begin() + row * theirs.top_k;
      incoming.experts.insert(incoming.experts.end(), first, first + theirs.top_k);
      ++incoming.num_tokens;
    }
  }
  return incoming;
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
  const std::vector<std::int64_t>& rows_of_group = block.step.rows_of_group;
  Routing routing = routing_of(ctx, block, x_norm);
  if (ctx.dry_run()) routing = dry_routing(config_, block.index, comm_.rank(), routing.num_tokens);
  observe_experts(ctx, block, routing);
  Dispatch dispatch{.rows = rows_by_rank(routing), .incoming = std::vector<std::int64_t>(rows_of_group.size())};
  const Tensor outgoing = ctx.zeros("outgoing rows", MemoryClass::communication, DType::f32, {comm_.size()}),
               incoming = ctx.zeros("incoming rows", MemoryClass::communication, DType::f32, {comm_.size()});
  for (std::size_t rank = 0; rank < dispatch.rows.size() && !ctx.dry_run(); ++rank) {
    outgoing.data<float>()[rank] = static_cast<float>(dispatch.rows[rank].size());
  }
  const std::vector<std::int64_t> one_each(rows_of_group.size(), 1);
  comm_.all_to_all("row counts", pieces(outgoing, one_each), pieces(incoming, one_each));
  for (std::size_t rank = 0; rank < dispatch.rows.size(); ++rank) {
    if (ctx.dry_run()) {  // every rank's routing is known beforehand
      const Routing theirs = dry_routing(config_, block.index, static_cast<int>(rank), rows_of_group[rank]);
      dispatch.incoming[rank] = std::ssize(rows_by_rank(theirs)[static_cast<std::size_t>(comm_.rank())]);
      continue;
    }
    const bool own = static_cast<int>(rank) == comm_.rank();
    dispatch.incoming[rank] = own ? std::ssize(dispatch.rows[rank]) : std::lround(incoming.data<float>()[rank]);
    ISOMER_CHECK(dispatch.incoming[rank] >= 0 && dispatch.incoming[rank] <= rows_of_group[rank],
                 "rank {} sends {} rows, it has {}", rank, dispatch.incoming[rank], rows_of_group[rank]);
  }
  return dispatch;
}

/// The weighted sum of those of each row's experts that stand here.
Tensor DataParallelScheme::own_experts_of(RankContext& ctx, const DecodeBlock& block, const Tensor& rows) const {
  if (rows.size(0) == 0) return rows;
  Routing routing = routing_of(ctx, block, rows);
  if (ctx.dry_run()) routing = incoming_routing(block);
  LayerWeights weights = block.weights();
  weights.moe.shared_experts = {};
  FfnSaved dropped;
  return moe_forward(ctx, {config_, weights}, rows, Tensor(),
                     {.kind = RoutingSource::Kind::replayed, .replay = &routing}, dropped);
}

void DataParallelScheme::add_shared_experts(RankContext& ctx, const DecodeBlock& block, const Tensor& x_norm,
                                            const Tensor& y) const {
  const MlpWeights& shared = block.weights().moe.shared_experts;
  if (y.size(0) == 0 || !shared.gate_proj) return;
  FfnSaved dropped;
  add(ctx, "shared experts", y, swiglu_forward(ctx, "shared ", shared, x_norm, dropped.gate, dropped.up), y);
}

Tensor DataParallelScheme::routed_experts(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const DType dtype = x.dtype();
  const Tensor x_norm = normed(ctx, block, x);
  const Dispatch dispatch = dispatch_of(ctx, block, x_norm);
  std::vector<std::int64_t> outgoing;
  std::vector<std::int32_t> order;  // rows as they are sent, rank by rank
  for (const auto& rows : dispatch.rows) {
    outgoing.push_back(std::ssize(rows));
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
  Tensor y = as_dtype(ctx, "sum of experts", sum, dtype);
  add_shared_experts(ctx, block, x_norm, y);
  return y;
}

}  // namespace

Routing dry_routing(const ModelConfig& config, std::int64_t layer, int rank, std::int64_t rows) {
  const MoeConfig& moe = config.moe;
  std::mt19937_64 draws(static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint64_t>(rank));
  Routing routing{.num_tokens = rows, .top_k = moe.num_experts_per_tok};
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::ptrdiff_t first = row * routing.top_k;
    while (std::ssize(routing.experts) < first + routing.top_k) {
      const auto expert = static_cast<std::int32_t>(draws() % static_cast<std::uint64_t>(moe.n_routed_experts));
      const auto of_row = routing.experts.begin() + first;
      if (std::find(of_row, routing.experts.end(), expert) == routing.experts.end()) routing.experts.push_back(expert);
    }
  }
  return routing;
}

std::unique_ptr<StepScheme> make_dp_ep(const SchemeArguments& arguments) {
  return std::make_unique<DataParallelScheme>(arguments);
}

}  // namespace isomer
