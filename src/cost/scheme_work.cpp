#include "cost/scheme_work.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "cost/op_cost.h"

namespace isomer {

namespace {

/// FLOPs an element of elementwise work takes; the kernels enter the same into their record.
constexpr double kNormForward = 4, kNormBackward = 10, kRope = 3;

/// What sets schemes apart.
struct Kind {
  std::string_view name;
  bool absorbed = false;                      // attends in the latent space
  bool rope_apart = false;                    // absorbed queries and rope queries are two tensors
  bool gathers_latent = false;                // latent rows of all tokens stand on every rank
  bool gathers_rope = false;                  // the rope key alone
  int exchanges_forward, exchanges_backward;  // collectives
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {.name = "explicit", .exchanges_forward = 4, .exchanges_backward = 4},
      {.name = "explicit-shared-rope", .gathers_rope = true, .exchanges_forward = 5, .exchanges_backward = 5},
      {.name = "absorbed", .absorbed = true, .gathers_latent = true, .exchanges_forward = 3, .exchanges_backward = 3},
      {.name = "absorbed-two-product",
       .absorbed = true,
       .rope_apart = true,
       .gathers_latent = true,
       .exchanges_forward = 3,
       .exchanges_backward = 3},
      {.name = "laga", .gathers_latent = true, .exchanges_forward = 3, .exchanges_backward = 3}};
  return all;
}

const Kind& kind_of(std::string_view scheme) {
  const auto found = std::find_if(kinds().begin(), kinds().end(), [&](const Kind& k) { return k.name == scheme; });
  if (found == kinds().end()) {
    invalid_argument("scheme '{}' has no closed forms of its work; there are: {}", scheme,
                     fmt::join(schemes_with_work(), ", "));
  }
  return *found;
}

/// Sizes of one rank, as they enter the forms.
struct Sizes {
  Sizes(const ModelConfig& config, const TokenShards& shards, int rank)
      : c(config),
        t(static_cast<double>(shards.rows(rank))),
        S(static_cast<double>(shards.total_rows())),
        hp(static_cast<double>(config.num_attention_heads) / shards.num_ranks()),
        others(shards.num_ranks() - 1) {}

  const ModelConfig& c;
  double t, S, hp, others;  // own rows, all rows, own heads, P − 1
  double D = static_cast<double>(c.hidden_size), h = static_cast<double>(c.num_attention_heads);
  double d = static_cast<double>(c.kv_lora_rank), r = static_cast<double>(c.qk_rope_head_dim);
  double n = static_cast<double>(c.qk_nope_head_dim), v = static_cast<double>(c.v_head_dim);
  double q_lora = static_cast<double>(c.q_lora_rank);
  double query = h * (n + r);

  double query_weights() const { return q_lora > 0 ? q_lora * D + query * q_lora : query * D; }
  double latent_norm() const { return c.kv_a_layernorm ? 1 : 0; }
};

/// Products of activations with projection weights of own tokens, W_kv_b apart: the same for every scheme.
double projection_flops(const Sizes& s) { return 2 * s.t * (s.query_weights() + (s.d + s.r) * s.D + s.h * s.v * s.D); }

double norm_elements(const Sizes& s) { return s.t * (s.D + s.q_lora + s.latent_norm() * s.d); }

double rope_flops(const Sizes& s) { return kRope * s.t * (s.r + s.h * s.r); }

double bias_elements(const Sizes& s) {
  return s.c.attention_bias ? s.t * ((s.q_lora > 0 ? s.q_lora : 0) + s.d + s.r + s.D) : 0;
}

/// Products with W_UK and W_UV, once over.
double up_projection_flops(const Kind& kind, const Sizes& s) {
  const double rows_times_heads = kind.gathers_latent ? s.S * s.hp : s.t * s.h;
  return 2 * rows_times_heads * (s.n + s.v) * s.d;
}

OpCost attention_cost(const Kind& kind, const Sizes& s, const TokenShards& tokens, bool backward) {
  const std::int64_t pairs = tokens.batch * causal_pairs(0, tokens.seq, 0, tokens.seq);
  const auto heads = static_cast<std::int64_t>(s.hp);
  const SchemeCore core = scheme_core(kind.name, s.c, tokens, 0);
  const std::int64_t key = core.key_width, value = core.value_width;
  return backward ? attention_backward_cost(heads, pairs, key, value, 0)
                  : attention_forward_cost(heads, pairs, key, value, 0);
}

double forward_flops(const Kind& kind, const Sizes& s, const TokenShards& tokens) {
  return projection_flops(s) + up_projection_flops(kind, s) + attention_cost(kind, s, tokens, false).flops +
         kNormForward * norm_elements(s) + rope_flops(s) + bias_elements(s) + s.t * s.D;  // the residual
}

double backward_flops(const Kind& kind, const Sizes& s, const TokenShards& tokens) {
  double flops = 2 * projection_flops(s) + 2 * up_projection_flops(kind, s) +
                 attention_cost(kind, s, tokens, true).flops + kNormForward * s.t * s.D +
                 kNormBackward * norm_elements(s) + rope_flops(s) + bias_elements(s);
  // Gradients of the latent meet: of keys and values in the absorbed form, else of the rope key over heads.
  if (kind.absorbed) {
    flops += s.S * s.d;
  } else {
    flops += (kind.gathers_latent || kind.gathers_rope ? s.S * s.hp : s.t * s.h) * s.r;
  }
  if (kind.gathers_latent) flops += s.others * s.t * (s.d + s.r);  // sums of the reduce-scatter, in rank order
  if (kind.gathers_rope) flops += s.others * s.t * s.r;
  return flops;
}

/// Elements in the activations' dtype and float32 ones.
struct Elements {
  double activations = 0, statistics = 0;
  std::int64_t bytes(DType dtype) const {
    const double statistic = dtype == DType::f64 ? 8 : 4;
    return static_cast<std::int64_t>(activations * static_cast<double>(size_of(dtype)) + statistics * statistic);
  }
};

/// What the core reads and gives, saved: q, k, v or their absorbed forms, output and log-sum-exp.
Elements saved_by_core(const Kind& kind, const Sizes& s) {
  const double rows = s.S * s.hp;
  const double absorbed_width = s.d + (kind.rope_apart ? 0 : s.r);
  Elements e{.statistics = rows};
  e.activations = rows * (kind.absorbed ? (s.n + s.r) + absorbed_width + s.d : 2 * (s.n + s.r) + 2 * s.v);
  e.activations += (kind.gathers_latent ? s.S : s.t) * (s.d + s.r);
  return e;
}

Elements saved_by_projections(const Sizes& s) {
  return {.activations = s.t * (s.D + 2 * s.q_lora + s.latent_norm() * s.d),
          .statistics = s.t * (1 + (s.q_lora > 0 ? 1 : 0) + s.latent_norm())};
}

Elements core_gradients(const Kind& kind, const Sizes& s) {
  const double rows = s.S * s.hp;
  if (!kind.absorbed) return {.activations = rows * (2 * (s.n + s.r) + 2 * s.v)};  // dO, dq, dk, dv
  return {.activations = rows * (s.d + (s.d + s.r)), .statistics = s.S * ((s.d + s.r) + s.d)};
}

}  // namespace

const std::vector<std::string_view>& schemes_with_work() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const Kind& kind : kinds()) list.push_back(kind.name);
    return list;
  }();
  return names;
}

SchemeWork scheme_work(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens, DType activations,
                       int rank) {
  const Kind& kind = kind_of(scheme);
  const Sizes s(config, tokens, rank);
  const Elements core = saved_by_core(kind, s), projections = saved_by_projections(s),
                 gradients = core_gradients(kind, s);
  const Elements output_input{.activations = s.t * s.h * s.v};  // of W_o; gone before the core's backward
  const Elements dy{.activations = s.t * s.D};
  SchemeWork work{.flops_forward = forward_flops(kind, s, tokens), .flops_backward = backward_flops(kind, s, tokens)};
  const bool alone = tokens.num_ranks() == 1;
  work.exchanges_forward = alone ? 0 : kind.exchanges_forward;
  work.exchanges_backward = alone ? 0 : kind.exchanges_backward;
  work.messages = (tokens.num_ranks() - 1) * (kind.exchanges_forward + kind.exchanges_backward);
  work.saved_bytes = core.bytes(activations) + projections.bytes(activations) + output_input.bytes(activations);
  work.core_backward_bytes =
      core.bytes(activations) + projections.bytes(activations) + gradients.bytes(activations) + dy.bytes(activations);
  return work;
}

SchemeCore scheme_core(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens, int rank) {
  const Kind& kind = kind_of(scheme);
  SchemeCore core{.absorbed = kind.absorbed,
                  .key_width = kind.absorbed ? config.latent_width() : config.qk_head_dim(),
                  .value_width = kind.absorbed ? config.kv_lora_rank : config.v_head_dim,
                  .up_projected_rows = tokens.rows(rank),
                  .up_projected_heads = config.num_attention_heads};
  if (kind.gathers_latent) {
    core.up_projected_rows = tokens.total_rows();
    core.up_projected_heads /= tokens.num_ranks();
  }
  return core;
}

}  // namespace isomer
