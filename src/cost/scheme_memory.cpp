#include "cost/scheme_memory.h"

#include <algorithm>

namespace isomer {

namespace {

/// Elements in the activations' dtype and those in the statistics' (float32).
struct Elements {
  double activations = 0, statistics = 0;
  Elements& operator+=(const Elements& other) {
    activations += other.activations;
    statistics += other.statistics;
    return *this;
  }
  std::int64_t bytes(const SchemeShape& s) const {
    return static_cast<std::int64_t>(activations * s.element + statistics * s.statistic);
  }
};

/// x, and what the projections keep of the way from it to queries and latent rows.
Elements saved_by_projections(const SchemeShape& s) {
  if (s.grouped_query) return {.activations = s.own_rows * s.hidden, .statistics = s.own_rows};
  const double norm = s.c.kv_a_layernorm ? 1 : 0;
  return {.activations = s.own_rows * (s.hidden + 2 * s.q_lora + norm * s.latent),
          .statistics = s.own_rows * (1 + (s.q_lora > 0 ? 1 : 0) + norm)};
}

Elements latent_rows(const SchemeShape& s) {
  if (s.grouped_query) return {};
  const double rows = s.gathers_outside ? s.all_rows : s.gathers_latent ? s.group_rows : s.own_rows;
  return {.activations = rows * (s.latent + s.rope)};
}

/// The core reads the up-projection's output, and writes its gradient in place.
bool is_in_place(const SchemeShape& s) { return s.gathers_latent && s.writes_in_place(); }

/// Keys and values, or what stands for them, while the core works.
double key_elements(const SchemeShape& s) {
  const double rows = s.group_rows * s.own_heads, up_projected = s.nope + s.value_head;
  switch (s.keys) {
    case KeptKeys::whole: return s.group_rows * s.own_kv_heads * (s.key + s.value);
    case KeptKeys::view: return rows * (s.key + up_projected);
    case KeptKeys::strided: return rows * up_projected;
    case KeptKeys::rebuilt: return rows * (is_in_place(s) ? up_projected : s.key + s.value);
    case KeptKeys::latent: return rows * (s.latent + (s.rope_apart ? 0 : s.rope));  // the absorbed queries
    case KeptKeys::blocks: return s.keeps_built_keys ? s.all_rows * s.own_heads * up_projected : 0;
  }
  return 0;
}

double query_elements(const SchemeShape& s) { return s.group_rows * s.own_heads * (s.query_width / s.heads); }

Elements core_result(const SchemeShape& s) {
  const double rows = s.group_rows * s.own_heads;
  return {.activations = rows * s.value, .statistics = rows};
}

/// Buffers of a ring at its worst step: `width` elements a row pass round, their sums behind them, and `beside` stands
/// at each step.
template <class Beside>
std::int64_t worst_step(const SchemeShape& s, double width, Beside&& beside) {
  const int groups = s.layout.outer_groups;
  std::int64_t worst = 0;
  for (int step = 1; step <= groups; ++step) {  // the last is for the own block
    const bool own = step == groups;
    Elements e = beside(s.group_at(step));
    const double here = s.rows_of(s.group_at(step)) * width;
    if (!own) e.activations += here;
    if (step + 1 < groups) e.activations += s.rows_of(s.group_at(step + 1)) * width;
    e.statistics += here;                                                           // this rank's share
    if (step >= 2) e.statistics += here + s.rows_of(s.group_at(step - 1)) * width;  // the sum that comes, and the last
    worst = std::max(worst, e.bytes(s));
    if (own) break;
    // The core is done with the block; its sum is on its way out, and the next one's on its way in.
    const double coming = s.rows_of(s.group_at(step + 1)) * width;
    const double blocks = here + (step + 1 < groups ? coming : 0);
    worst = std::max(worst, Elements{.activations = blocks, .statistics = here + coming}.bytes(s));
  }
  return worst;
}

/// Keys and values of one block, rebuilt, and their gradients in float32; the largest of a group's that is seen.
Elements rebuilt_block(const SchemeShape& s, const std::vector<KeyPart>& parts, int group) {
  double rows = 0;
  for (const KeyPart& part : parts) {
    if (part.seeing_rows > 0 && (group < 0 || s.group_at(part.step) == group)) rows = std::max(rows, part.rows);
  }
  const double elements = rows * s.own_heads * (s.nope + s.value_head);
  return {.activations = s.keeps_built_keys ? 0 : elements, .statistics = elements};
}

/// Gradients and buffers of the core's backward, beside what is saved.
std::int64_t gradient_bytes(const SchemeShape& s) {
  const double rows = s.group_rows * s.own_heads;
  if (s.is_absorbed()) {  // dõ, dq̃ with its rope columns; gradients of the latent as keys and as values
    return Elements{.activations = rows * (2 * s.latent + s.rope), .statistics = s.group_rows * (2 * s.latent + s.rope)}
        .bytes(s);
  }
  const Elements dout{.activations = rows * s.value_head}, dq_sum{.statistics = query_elements(s)};
  if (s.rebuilds_blocks()) {
    const auto parts = key_parts(s);
    const std::int64_t beside = dout.bytes(s) + dq_sum.bytes(s);
    if (s.gathers_outside) {
      Elements e = rebuilt_block(s, parts, -1);
      e.statistics += s.all_rows * (s.latent + s.rope);
      return beside + e.bytes(s);
    }
    return beside + worst_step(s, s.passing_width(), [&](int group) { return rebuilt_block(s, parts, group); });
  }
  if (s.passes_keys() && s.groups > 1) {
    return dout.bytes(s) + dq_sum.bytes(s) + worst_step(s, s.passing_width(), [](int) { return Elements{}; });
  }
  Elements e = dout;
  e.activations += query_elements(s);
  if (is_in_place(s)) {
    e += {.activations = rows * (s.nope + s.value_head), .statistics = s.group_rows * (s.latent + s.rope)};
  } else {
    e.activations += s.group_rows * s.own_kv_heads * (s.key + s.value);
  }
  return e.bytes(s);
}

}  // namespace

std::int64_t saved_bytes(const SchemeShape& s) {
  if (s.recomputes_block) return Elements{.activations = s.own_rows * s.hidden}.bytes(s);
  Elements e = saved_by_projections(s);
  e += latent_rows(s);
  e.activations += query_elements(s) + (s.keys == KeptKeys::rebuilt ? 0 : key_elements(s));
  const bool o_is_core_output = keeps_all_heads(s.layout.scheme);
  if (!s.recomputes_attention) e += core_result(s);
  if (!o_is_core_output) e.activations += s.own_rows * s.heads * s.value_head;
  return e.bytes(s);
}

std::int64_t core_backward_bytes(const SchemeShape& s) {
  Elements saved = saved_by_projections(s);
  saved += latent_rows(s);
  saved += core_result(s);
  saved.activations += query_elements(s) + key_elements(s);
  const Elements dy{.activations = s.own_rows * s.hidden};
  return saved.bytes(s) + dy.bytes(s) + gradient_bytes(s);
}

}  // namespace isomer
