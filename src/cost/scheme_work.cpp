#include "cost/scheme_work.h"

#include "cost/op_cost.h"
#include "cost/scheme_memory.h"
#include "cost/scheme_shape.h"

namespace isomer {

namespace {

/// FLOPs an element of elementwise work takes; the kernels enter the same into their record.
constexpr double kNormForward = 4, kNormBackward = 10, kRope = 3, kMerge = 4, kScale = 2;

/// Products of own tokens with projection weights, W_kv_b apart.
double projection_flops(const SchemeShape& s) {
  const double output = s.heads * s.value_head * s.hidden;
  if (s.grouped_query) {
    return 2 * s.own_rows * (s.query_width * s.hidden + 2 * s.kv_heads * s.key * s.hidden + output);
  }
  const double query = s.q_lora > 0 ? s.q_lora * s.hidden + s.query_width * s.q_lora : s.query_width * s.hidden;
  return 2 * s.own_rows * (query + (s.latent + s.rope) * s.hidden + output);
}

double norm_elements(const SchemeShape& s) {
  const double inner = s.grouped_query ? 0 : s.q_lora + (s.c.kv_a_layernorm ? s.latent : 0);
  return s.own_rows * (s.hidden + inner);
}

/// Queries of all heads and one rope key; grouped-query: queries and keys whole.
double rope_flops(const SchemeShape& s) {
  return kRope * s.own_rows * s.rope * (s.heads + (s.grouped_query ? s.kv_heads : 1));
}

double bias_elements(const SchemeShape& s) {
  if (!s.c.attention_bias) return 0;
  if (s.grouped_query) {
    const double output = s.c.model_type == "qwen2" ? 0 : s.hidden;  // Qwen2 has none on o_proj
    return s.own_rows * (s.query_width + 2 * s.kv_heads * s.key + output);
  }
  return s.own_rows * (s.q_lora + s.latent + s.rope + s.hidden);
}

/// MiniCPM3 multiplies what a block adds by a constant.
double residual_scale_flops(const SchemeShape& s) {
  return s.c.residual_scale() != 1 ? kScale * s.own_rows * s.hidden : 0;
}

double seen_rows(const std::vector<KeyPart>& parts) {
  double rows = 0;
  for (const KeyPart& part : parts) rows += part.seeing_rows > 0 ? part.rows : 0;
  return rows;
}

/// Rows × heads that meet W_UK and W_UV.
struct UpProjected {
  double forward = 0;  // before or between the core's forward
  double built = 0;    // whose gradients the backward takes
  double rebuilt = 0;  // once more in the backward, recomputation of the core apart
  double in_core = 0;  // part of the core's forward, so done again where that is recomputed
};

UpProjected up_projected(const SchemeShape& s, const std::vector<KeyPart>& parts) {
  if (s.grouped_query) return {};
  if (s.rebuilds_blocks()) {
    const double seen = seen_rows(parts) * s.own_heads;
    if (s.keeps_built_keys) return {.forward = s.all_rows * s.own_heads, .built = seen};
    return {.forward = seen, .built = seen, .rebuilt = seen, .in_core = seen};
  }
  const double once = s.gathers_latent ? s.group_rows * s.own_heads : s.own_rows * s.heads;
  return {.forward = once, .built = once, .rebuilt = s.keys == KeptKeys::rebuilt ? once : 0};
}

double up_projection_flops(const SchemeShape& s, double rows_times_heads) {
  return 2 * rows_times_heads * (s.nope + s.value_head) * s.latent;
}

double core_flops(const SchemeShape& s, bool backward) {
  const auto heads = static_cast<std::int64_t>(s.own_heads), key = static_cast<std::int64_t>(s.key),
             value = static_cast<std::int64_t>(s.value);
  return backward ? attention_backward_cost(heads, s.pairs(), key, value, 0).flops
                  : attention_forward_cost(heads, s.pairs(), key, value, 0).flops;
}

/// Every part but the first is merged into the result.
double merge_flops(const SchemeShape& s, const std::vector<KeyPart>& parts) {
  double rows = 0;
  for (std::size_t i = 1; i < parts.size(); ++i) rows += parts[i].seeing_rows;
  return kMerge * rows * s.own_heads * s.value;
}

/// Sums of gradients that meet after the core: over heads, over KV heads' copies, over ranks and round the ring.
double sum_flops(const SchemeShape& s) {
  double flops = 0;
  if (s.is_absorbed()) {
    flops += s.group_rows * s.latent;  // the latent's, as keys and as values
  } else if (s.grouped_query) {
    if (s.kv_copies > 1) flops += 2 * s.own_rows * s.kv_heads * s.kv_copies * s.key;
  } else if (!s.rebuilds_blocks() && !(s.gathers_latent && s.writes_in_place())) {
    const bool by_group = s.gathers_latent || s.gathers_rope;
    flops += (by_group ? s.group_rows * s.own_heads : s.own_rows * s.heads) * s.rope;
  }
  // Sums of a reduce-scatter, in rank order.
  if (s.gathers_latent) flops += (s.inner - 1) * s.own_rows * (s.latent + s.rope);
  if (s.gathers_rope) flops += (s.inner - 1) * s.own_rows * s.rope;
  if (s.gathers_outside) flops += (s.groups - 1) * s.own_rows * (s.latent + s.rope);
  if (s.passing > 0 && s.groups > 1) flops += (s.all_rows - s.rows_of(s.group_at(1))) * s.passing_width();
  return flops;
}

struct Flops {
  double forward = 0, backward = 0;
};

Flops flops_of(const SchemeShape& s, const std::vector<KeyPart>& parts) {
  const UpProjected up = up_projected(s, parts);
  const double core = core_flops(s, false) + merge_flops(s, parts), projections = projection_flops(s);
  Flops flops;
  flops.forward = projections + up_projection_flops(s, up.forward) + core + kNormForward * norm_elements(s) +
                  rope_flops(s) + bias_elements(s) + residual_scale_flops(s) + s.own_rows * s.hidden;  // the residual
  flops.backward = 2 * projections + up_projection_flops(s, 2 * up.built + up.rebuilt) + core_flops(s, true) +
                   kNormForward * s.own_rows * s.hidden + kNormBackward * norm_elements(s) + rope_flops(s) +
                   bias_elements(s) + residual_scale_flops(s) + sum_flops(s);
  if (s.recomputes_attention) flops.backward += core + up_projection_flops(s, up.in_core);
  if (s.recomputes_block) flops.backward += flops.forward;
  return flops;
}

void count_messages(const SchemeShape& s, SchemeWork& work) {
  const int inner = s.layout.inner_ranks - 1, outer = s.layout.outer_groups - 1;
  const int inside = inner > 0 ? s.exchanges : 0, outside = s.gathers_outside && outer > 0 ? 1 : 0;
  work.exchanges_forward = work.exchanges_backward = inside + outside;
  work.passes_forward = s.passing * outer;
  work.passes_backward = 2 * s.passing * outer;  // blocks, and sums behind them
  if (s.recomputes_attention) work.passes_backward += work.passes_forward;
  if (s.recomputes_block) {
    work.exchanges_backward += work.exchanges_forward;
    work.passes_backward += work.passes_forward;
  }
  const int again = s.recomputes_block ? 3 : 2;
  work.messages = again * (inside * inner + outside * outer) + work.passes_forward + work.passes_backward;
}

}  // namespace

const std::vector<std::string_view>& schemes_with_work(AttentionKind kind) {
  static const std::vector<std::string_view> latent = {"explicit",
                                                       "explicit-shared-rope",
                                                       "absorbed",
                                                       "absorbed-two-product",
                                                       "laga",
                                                       "laga,kv=strided",
                                                       "laga,kv=rebuild",
                                                       "ring",
                                                       "latent-gather",
                                                       "latent-ring",
                                                       "explicit,ring",
                                                       "laga,ring",
                                                       "laga,latent-ring"};
  static const std::vector<std::string_view> grouped_query = {"explicit", "ring", "explicit,ring"};
  return kind == AttentionKind::mla ? latent : grouped_query;
}

SchemeWork scheme_work(const SchemeCase& block, int rank) {
  const SchemeShape s(block, rank);
  const auto parts = s.rebuilds_blocks() || s.groups > 1 ? key_parts(s) : std::vector<KeyPart>{};
  const Flops flops = flops_of(s, parts);
  SchemeWork work{.flops_forward = flops.forward, .flops_backward = flops.backward};
  count_messages(s, work);
  work.saved_bytes = saved_bytes(s);
  work.core_backward_bytes = core_backward_bytes(s);
  return work;
}

SchemeCore scheme_core(const SchemeCase& block, int rank) {
  const SchemeShape s(block, rank);
  const auto parts = s.rebuilds_blocks() ? key_parts(s) : std::vector<KeyPart>{};
  const UpProjected up = up_projected(s, parts);
  SchemeCore core{.absorbed = s.is_absorbed(),
                  .heads = static_cast<std::int64_t>(s.own_heads),
                  .kv_heads = s.is_absorbed() ? 1 : static_cast<std::int64_t>(s.own_kv_heads),
                  .key_width = static_cast<std::int64_t>(s.key),
                  .value_width = static_cast<std::int64_t>(s.value)};
  const std::int64_t whole = s.tokens.batch * causal_pairs(0, s.tokens.seq, 0, s.tokens.seq);
  core.share_of_pairs = static_cast<double>(s.pairs()) / static_cast<double>(whole);
  const bool own_heads = s.gathers_latent || s.rebuilds_blocks();
  core.up_projected_heads = static_cast<std::int64_t>(own_heads ? s.own_heads : s.heads);
  core.up_projected = up.forward;
  core.up_projected_again = up.rebuilt;
  core.up_projected_in_core = up.in_core;
  return core;
}

}  // namespace isomer
