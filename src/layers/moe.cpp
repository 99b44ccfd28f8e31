// The mixture of experts: tokens sorted by expert, one product an expert and projection, and the sum over each token's
// experts in the order of its choices.
#include <algorithm>
#include <utility>

#include "kernels/ffn_ops.h"
#include "kernels/grouped_matmul.h"
#include "layers/ffn_parts.h"
#include "layers/gradients.h"
#include "sharding/tokens.h"

namespace isomer {

namespace {

using Projection = Tensor MlpWeights::*;

/// One projection of all experts as the second factor of y = x·Wᵀ (transposed), or of dx = dy·W.
std::vector<Tensor> factors(const MoeWeights& weights, Projection projection, bool transposed) {
  std::vector<Tensor> result;
  for (const MlpWeights& expert : weights.experts) {
    const Tensor& weight = expert.*projection;
    result.push_back(transposed && weight ? weight.transpose(0, 1) : weight);
  }
  return result;
}

Tensor expert_rows(RankContext& ctx, std::string_view name, MemoryClass memory_class, DType dtype,
                   const ExpertRows& rows, std::int64_t width) {
  return ctx.empty(name, memory_class, dtype, {rows.num_rows(), width});
}

void expert_weight_gradients(RankContext& ctx, std::string_view name, const Tensor& dy, const Tensor& x,
                             const ExpertRows& rows, Projection projection, MoeWeights& gradients) {
  const bool accumulate = (gradients.experts.front().*projection).defined();
  std::vector<Tensor> out;
  for (MlpWeights& expert : gradients.experts) {
    Tensor& gradient = expert.*projection;
    if (!accumulate) {
      gradient = ctx.empty(name, MemoryClass::gradient, statistic_dtype(x.dtype()), {dy.size(1), x.size(1)});
    }
    out.push_back(gradient);
  }
  grouped_weight_gradient(ctx, name, dy, x, rows.begin, out, accumulate);
}

ExpertRows rows_of(const FfnLayer& layer, const Routing& routing) {
  return sort_by_expert(routing.experts, routing.num_tokens, routing.top_k,
                        static_cast<std::int64_t>(layer.weights.moe.experts.size()));
}

/// The experts that this rank has, neighbours: those whose weights are defined.
IndexRange own_experts(const MoeWeights& weights) {
  const auto has = [](const MlpWeights& expert) { return expert.gate_proj.defined(); };
  const auto begin = std::find_if(weights.experts.begin(), weights.experts.end(), has);
  const auto end = std::find_if_not(begin, weights.experts.end(), has);
  ISOMER_CHECK(begin != end && std::none_of(end, weights.experts.end(), has), "a rank's experts are neighbours");
  return {begin - weights.experts.begin(), end - begin};
}

/// Fills saved.expert_gate, expert_up and expert_out. Rows of other ranks' experts are 0.
void experts_forward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, const ExpertRows& rows,
                     FfnSaved& saved) {
  FunctionScope scope(ctx);
  const MoeWeights& w = layer.weights.moe;
  const IndexRange own = own_experts(w);
  const auto first = static_cast<std::size_t>(own.begin), count = static_cast<std::size_t>(own.count);
  const bool all = count == w.experts.size();
  std::vector<std::int64_t> begin(rows.begin.begin() + own.begin, rows.begin.begin() + own.end() + 1);
  const std::int64_t row = begin.front(), num_rows = begin.back() - row;
  for (std::int64_t& at : begin) at -= row;
  const auto part = [&](const Tensor& t) { return all ? t : t.slice(0, row, num_rows); };
  const auto weights_of = [&](Projection projection) {
    const auto every = factors(w, projection, true);
    return std::vector<Tensor>(every.begin() + own.begin, every.begin() + own.end());
  };
  const DType dtype = x_norm.dtype();
  const std::int64_t hidden = x_norm.size(1), width = w.experts[first].gate_proj.size(0);
  Tensor x_rows = expert_rows(ctx, "expert input", MemoryClass::workspace, dtype, rows, hidden);
  gather_slots(ctx, "expert input", x_norm, rows, Tensor(), x_rows);
  saved.expert_gate = expert_rows(ctx, "expert gate", MemoryClass::saved, dtype, rows, width);
  grouped_matmul(ctx, "experts gate_proj", part(x_rows), begin, weights_of(&MlpWeights::gate_proj),
                 part(saved.expert_gate));
  saved.expert_up = expert_rows(ctx, "expert up", MemoryClass::saved, dtype, rows, width);
  grouped_matmul(ctx, "experts up_proj", part(x_rows), begin, weights_of(&MlpWeights::up_proj), part(saved.expert_up));
  scope.release(std::move(x_rows));
  Tensor activation = expert_rows(ctx, "expert activation", MemoryClass::workspace, dtype, rows, width);
  silu_mul(ctx, "experts silu", part(saved.expert_gate), part(saved.expert_up), part(activation));
  saved.expert_out = all ? expert_rows(ctx, "expert output", MemoryClass::saved, dtype, rows, hidden)
                         : ctx.zeros("expert output", MemoryClass::saved, dtype, {rows.num_rows(), hidden});
  grouped_matmul(ctx, "experts down_proj", part(activation), begin, weights_of(&MlpWeights::down_proj),
                 part(saved.expert_out));
  scope.release(std::move(activation));
}

/// Takes drows [R, D], the gradient of the experts' output rows; returns that of their input rows, [R, D] in the
/// statistics' dtype.
Tensor experts_backward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, const ExpertRows& rows,
                        FfnSaved& saved, Tensor drows, MoeWeights& gradients) {
  const MoeWeights& w = layer.weights.moe;
  const DType dtype = x_norm.dtype();
  const std::int64_t hidden = x_norm.size(1);
  Tensor gate = std::move(saved.expert_gate), up = std::move(saved.expert_up);
  Tensor activation = expert_rows(ctx, "expert activation", MemoryClass::workspace, dtype, rows, gate.size(1));
  silu_mul(ctx, "experts silu again", gate, up, activation);
  expert_weight_gradients(ctx, "d experts down_proj", drows, activation, rows, &MlpWeights::down_proj, gradients);
  // The activation's own gradient takes its place; gate's and up's take theirs.
  grouped_matmul(ctx, "dx experts down_proj", drows, rows.begin, factors(w, &MlpWeights::down_proj, false), activation);
  drows = Tensor();
  silu_mul_backward(ctx, "experts silu backward", gate, up, activation, gate, up);
  activation = Tensor();
  Tensor x_rows = expert_rows(ctx, "expert input", MemoryClass::workspace, dtype, rows, hidden);
  gather_slots(ctx, "expert input again", x_norm, rows, Tensor(), x_rows);
  expert_weight_gradients(ctx, "d experts gate_proj", gate, x_rows, rows, &MlpWeights::gate_proj, gradients);
  expert_weight_gradients(ctx, "d experts up_proj", up, x_rows, rows, &MlpWeights::up_proj, gradients);
  x_rows = Tensor();
  Tensor dx_rows = expert_rows(ctx, "d expert input", MemoryClass::workspace, statistic_dtype(dtype), rows, hidden);
  grouped_matmul(ctx, "dx experts gate_proj", gate, rows.begin, factors(w, &MlpWeights::gate_proj, false), dx_rows);
  gate = Tensor();
  grouped_matmul(ctx, "dx experts up_proj", up, rows.begin, factors(w, &MlpWeights::up_proj, false), dx_rows, true);
  return dx_rows;
}

}  // namespace

Tensor moe_forward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, const Tensor& first,
                   const RoutingSource& source, FfnSaved& saved) {
  FunctionScope scope(ctx);
  const MoeWeights& w = layer.weights.moe;
  Routed routed = route(ctx, layer.config, w, x_norm, source);
  saved.scores = std::move(routed.scores);
  saved.routing = std::move(routed.routing);
  const ExpertRows rows = rows_of(layer, saved.routing);
  saved.expert_row_begin = rows.begin;
  experts_forward(ctx, layer, x_norm, rows, saved);
  Tensor shared;
  if (w.shared_experts.gate_proj) {
    shared = swiglu_forward(ctx, "shared ", w.shared_experts, x_norm, saved.gate, saved.up);
  }
  // The shared experts' output, where there is one, becomes the sum.
  Tensor y = shared ? shared : ctx.empty("y", MemoryClass::workspace, x_norm.dtype(), x_norm.shape());
  combine_slots(ctx, "combine experts",
                {.from = saved.expert_out, .weights = routed.weights, .first = first, .second = shared, .out = y},
                rows);
  scope.release(std::move(routed.weights));
  return y;
}

Tensor moe_backward(RankContext& ctx, const FfnLayer& layer, const Tensor& x_norm, FfnSaved&& taken, const Tensor& dy,
                    FfnGradients& gradients) {
  FfnSaved saved = std::move(taken);
  const MoeWeights& w = layer.weights.moe;
  const ExpertRows rows = rows_of(layer, saved.routing);
  gradients.moe.experts.resize(w.experts.size());
  Tensor weights = routing_weights(ctx, layer.config, saved.scores, saved.routing);
  Tensor dweights = ctx.empty("d routing weights", MemoryClass::workspace, saved.scores.dtype(), weights.shape());
  slot_dots(ctx, "d routing weights", dy, saved.expert_out, rows, dweights);
  saved.expert_out = Tensor();
  Tensor drows = expert_rows(ctx, "d expert output", MemoryClass::workspace, dy.dtype(), rows, dy.size(1));
  gather_slots(ctx, "d expert output", dy, rows, weights, drows);
  weights = Tensor();
  Tensor dx_rows = experts_backward(ctx, layer, x_norm, rows, saved, std::move(drows), gradients.moe);
  const Tensor dx_norm = ctx.empty("d x normed", MemoryClass::workspace, statistic_dtype(dy.dtype()), dy.shape());
  combine_slots(ctx, "combine d expert input", {.from = dx_rows, .out = dx_norm}, rows);
  dx_rows = Tensor();
  route_backward(ctx, layer.config, w,
                 {.x_norm = x_norm,
                  .scores = std::move(saved.scores),
                  .routing = &saved.routing,
                  .dweights = std::move(dweights),
                  .dscores = std::move(saved.dscores),
                  .dx_norm = dx_norm},
                 gradients.moe.gate);
  if (w.shared_experts.gate_proj) {
    swiglu_backward(ctx, "shared ", w.shared_experts,
                    {.x_norm = x_norm,
                     .gate = std::move(saved.gate),
                     .up = std::move(saved.up),
                     .dy = dy,
                     .dx_norm = dx_norm,
                     .accumulate = true},
                    gradients.moe.shared_experts);
  }
  return dx_norm;
}

}  // namespace isomer
