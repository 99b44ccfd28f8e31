// The router of a mixture of experts, and routings given beforehand.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/matmul.h"
#include "kernels/router_ops.h"
#include "layers/ffn_parts.h"
#include "layers/gradients.h"

namespace isomer {

namespace {

RouterRule rule_of(const MoeConfig& moe) {
  RouterRule rule{.top_k = moe.num_experts_per_tok, .factor = moe.routed_scaling_factor};
  if (moe.router != RouterKind::softmax_greedy) {
    rule.n_group = moe.n_group;
    rule.topk_group = moe.topk_group;
  }
  if (moe.router == RouterKind::sigmoid_noaux_tc) {
    rule.sigmoid = true;
    rule.group_best = 2;
    rule.normalise = moe.norm_topk_prob;
  } else if (moe.norm_topk_prob && moe.num_experts_per_tok > 1) {
    rule.normalise = true;
    rule.factor = 1;
  }
  return rule;
}

Routing balanced_routing(std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_experts) {
  Routing routing{.num_tokens = num_tokens, .top_k = top_k};
  for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
    routing.experts.push_back(static_cast<std::int32_t>(slot % num_experts));
  }
  return routing;
}

/// SplitMix64's output for a counter.
std::uint64_t hashed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
/// In (0, 1), by (seed, index) alone.
double uniform(std::uint64_t seed, std::uint64_t index) {
  return (static_cast<double>(hashed(hashed(seed) + index) >> 11) + 0.5) * 0x1p-53;
}

/// Experts in order of popularity, by the seed.
std::vector<std::int32_t> popularity_order(std::uint64_t seed, std::int64_t num_experts) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    const auto j = static_cast<std::size_t>(uniform(~seed, i) * static_cast<double>(i));
    std::swap(order[i - 1], order[j]);
  }
  return order;
}

/// Drawing without putting back is taking the top_k largest of ln(weight) + Gumbel noise.
Routing zipf_routing(const RoutingSource& source, std::int64_t num_tokens, std::int64_t top_k,
                     std::int64_t num_experts) {
  const std::vector<std::int32_t> order = popularity_order(source.seed, num_experts);
  Routing routing{.num_tokens = num_tokens, .top_k = top_k};
  std::vector<std::pair<double, std::int32_t>> draws(order.size());
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::size_t rank = 0; rank < order.size(); ++rank) {
      const double u = uniform(source.seed, static_cast<std::uint64_t>(t * num_experts) + rank);
      const double popularity = -source.zipf_exponent * std::log(static_cast<double>(rank + 1));
      draws[rank] = {std::log(-std::log(u)) - popularity, order[rank]};  // negated, so that the least come first
    }
    std::partial_sort(draws.begin(), draws.begin() + top_k, draws.end());
    for (std::int64_t j = 0; j < top_k; ++j) routing.experts.push_back(draws[static_cast<std::size_t>(j)].second);
  }
  return routing;
}

Routing replayed_routing(const Routing* replay, std::int64_t num_tokens, std::int64_t top_k) {
  if (replay == nullptr) invalid_argument("routing is to be replayed, but none is given: record one first");
  const bool fits = replay->num_tokens == num_tokens && replay->top_k == top_k &&
                    static_cast<std::int64_t>(replay->experts.size()) == num_tokens * top_k;
  if (!fits) {
    invalid_argument(
        "the replayed routing is of {} tokens × {} experts ({} entries), the layer has {} × {}: replay "
        "the routing of the same layer and tokens",
        replay->num_tokens, replay->top_k, replay->experts.size(), num_tokens, top_k);
  }
  return *replay;
}

}  // namespace

Routing given_routing(const RoutingSource& source, std::int64_t num_tokens, std::int64_t top_k,
                      std::int64_t num_experts) {
  if (source.kind == RoutingSource::Kind::replayed) return replayed_routing(source.replay, num_tokens, top_k);
  if (source.kind == RoutingSource::Kind::zipf) return zipf_routing(source, num_tokens, top_k, num_experts);
  return balanced_routing(num_tokens, top_k, num_experts);
}

Tensor routing_weights(RankContext& ctx, const ModelConfig& config, const Tensor& scores, const Routing& routing) {
  Tensor weights = ctx.empty("routing weights", MemoryClass::workspace, scores.dtype(),
                             {scores.size(0), config.moe.num_experts_per_tok});
  router_weights(ctx, "routing weights", rule_of(config.moe), scores, routing.experts, weights);
  return weights;
}

Routed route(RankContext& ctx, const ModelConfig& config, const MoeWeights& weights, const Tensor& x_norm,
             const RoutingSource& source) {
  const RouterRule rule = rule_of(config.moe);
  const std::int64_t num_tokens = x_norm.size(0), num_experts = weights.gate.size(0);
  Routed routed;
  routed.scores =
      ctx.empty("router scores", MemoryClass::saved, statistic_dtype(x_norm.dtype()), {num_tokens, num_experts});
  matmul(ctx, "router gate", x_norm, weights.gate.transpose(0, 1), routed.scores);
  router_scores(ctx, "router scores", rule, routed.scores, routed.scores);
  if (source.kind == RoutingSource::Kind::computed && !ctx.dry_run()) {
    routed.routing = {.num_tokens = num_tokens, .top_k = rule.top_k};
    routed.routing.experts.resize(static_cast<std::size_t>(num_tokens * rule.top_k));
    choose_experts(ctx, "router choice", rule, routed.scores, weights.e_score_correction_bias, routed.routing.experts);
  } else {
    routed.routing = given_routing(source, num_tokens, rule.top_k, num_experts);
  }
  routed.weights = routing_weights(ctx, config, routed.scores, routed.routing);
  return routed;
}

void route_backward(RankContext& ctx, const ModelConfig& config, const MoeWeights& weights, RouterBackward a,
                    Tensor& dgate) {
  Tensor dlogits = ctx.empty("d router logits", MemoryClass::workspace, a.scores.dtype(), a.scores.shape());
  router_backward(ctx, "router backward", rule_of(config.moe), a.scores, a.routing->experts, a.dweights, a.dscores,
                  dlogits);
  if (dlogits.dtype() != a.x_norm.dtype()) {  // products take operands of one type
    Tensor rounded = ctx.empty("d router logits rounded", MemoryClass::workspace, a.x_norm.dtype(), dlogits.shape());
    copy(ctx, "round d router logits", dlogits, rounded);
    dlogits = std::move(rounded);
  }
  add_weight_gradient(ctx, "d router gate", dlogits, a.x_norm, dgate);
  matmul(ctx, "dx router gate", dlogits, weights.gate, a.dx_norm, true);
}

}  // namespace isomer
