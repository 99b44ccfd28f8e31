#include "cost/scheme_bytes.h"

#include "core/error.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

/// How a rank's part and the whole enter the bytes of the direct algorithm inside an inner group, in elements.
struct Exchange {
  std::int64_t own_rows, all_rows;  // t_p·batch, the group's rows
  std::int64_t peers;               // P − 1

  // An all-to-all of `width` elements a token over all heads, an equal share of them each rank's: tokens to heads sends
  // own tokens of foreign heads, heads to tokens foreign tokens of own heads. What one direction sends the other
  // receives.
  std::int64_t to_heads(std::int64_t width) const { return own_rows * (width - own(width)); }
  std::int64_t to_tokens(std::int64_t width) const { return (all_rows - own_rows) * own(width); }
  std::int64_t own(std::int64_t width) const { return width / (peers + 1); }
  std::int64_t gather_sent(std::int64_t width) const { return peers * own_rows * width; }
  std::int64_t gather_received(std::int64_t width) const { return (all_rows - own_rows) * width; }
};

/// Blocks that pass round the outer groups, in elements for `width` elements a row. A rank passes on every block but
/// its successor's, and receives every one but its own; sums start behind the block's owner and end with it.
struct Ring {
  std::int64_t all_rows, own_rows, next_rows, previous_rows;  // of groups

  std::int64_t blocks_sent(std::int64_t width) const { return (all_rows - next_rows) * width; }
  std::int64_t blocks_received(std::int64_t width) const { return (all_rows - own_rows) * width; }
  std::int64_t sums_sent(std::int64_t width) const { return (all_rows - own_rows) * width; }
  std::int64_t sums_received(std::int64_t width) const { return (all_rows - previous_rows) * width; }
};

/// What a scheme sends: widths of tensors that go to heads in the forward (and come back as gradients), of rows that
/// are gathered (their gradient sums scattered), and of rows that pass round.
struct Traffic {
  std::int64_t to_heads = 0;   // q, k, v, … of all heads
  std::int64_t to_tokens = 0;  // o of all heads
  std::int64_t gathered = 0;   // a token
  std::int64_t round = 0;      // a row of a group
};

/// k' KV heads travel, copies included, and pass round in equal shares of the inner ranks.
Traffic grouped_query_traffic(const SequenceLayout& layout, const ModelConfig& c) {
  const KvHeadShards kv{c.num_key_value_heads, layout.inner_ranks};
  const std::int64_t queries = c.num_attention_heads * c.head_dim;
  Traffic traffic;
  if (layout.scheme == "explicit") {
    traffic = {queries + 2 * kv.with_copies() * c.head_dim, queries, 0};
  } else if (layout.scheme != "ring") {
    invalid_argument("scheme '{}' has no closed form of its bytes for grouped-query attention", layout.scheme);
  }
  if (layout.scheme == "ring" || layout.outer == "ring") traffic.round = 2 * kv.per_rank() * c.head_dim;
  return traffic;
}

Traffic latent_traffic(const SequenceLayout& layout, const ModelConfig& c) {
  const std::int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim;
  const std::int64_t h = c.num_attention_heads, own_heads = h / layout.inner_ranks;
  const std::string& scheme = layout.scheme;
  Traffic traffic;
  if (scheme == "explicit") {
    traffic = {h * (2 * (n + r) + v), h * v, 0};
  } else if (scheme == "explicit-shared-rope") {
    traffic = {h * ((n + r) + n + v), h * v, r};
  } else if (scheme == "laga" || scheme == "absorbed" || scheme == "absorbed-two-product") {
    traffic = {h * (n + r), h * v, c.latent_width()};
  } else if (scheme == "latent-gather") {
    traffic = {.gathered = c.latent_width()};
  } else if (!keeps_all_heads(scheme)) {
    invalid_argument("scheme '{}' has no closed form of its bytes", scheme);
  }
  const std::string& round = keeps_all_heads(scheme) ? scheme : layout.outer;
  if (round == "ring") traffic.round = own_heads * ((n + r) + v);
  if (round == "latent-ring") traffic.round = c.latent_width();
  return traffic;
}

Traffic traffic_of(const SequenceLayout& layout, const ModelConfig& c) {
  return c.attention == AttentionKind::gqa ? grouped_query_traffic(layout, c) : latent_traffic(layout, c);
}

std::int64_t statistic_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

/// Everything that the forms of one rank are made of.
struct Terms {
  Exchange inner;
  Ring outer;
  Traffic width;
  std::int64_t e, e_sum;
  bool repeats_round, repeats_forward;  // in the backward, by recomputation
};

Terms terms_of(const SchemeCase& block, int rank) {
  const SequenceLayout layout = sequence_layout(block.layout);
  const TokenShards t = token_shards_of(block.layout, block.seq, block.batch);
  const int group = t.group_of(rank), groups = t.num_groups;
  const std::string recompute = block.layout.option("recompute", "none");
  Terms terms{.inner = {t.rows(rank), t.group_rows(group), layout.inner_ranks - 1},
              .outer = {t.total_rows(), t.group_rows(group), t.group_rows((group + 1) % groups),
                        t.group_rows((group + groups - 1) % groups)},
              .width = traffic_of(layout, block.config),
              .e = size_of(block.activations),
              .e_sum = statistic_size(block.activations),
              .repeats_round = recompute == "attention",
              .repeats_forward = recompute == "block"};
  // Ranks that keep all heads gather over the outer groups.
  if (layout.scheme == "latent-gather") terms.inner = {t.rows(rank), t.total_rows(), groups - 1};
  return terms;
}

SchemeBytes with_recomputation(const Terms& t, SchemeBytes bytes, std::int64_t round) {
  if (t.repeats_round) {
    bytes.backward += round;
    bytes.backward_passed += round;
  }
  if (t.repeats_forward) {
    bytes.backward += bytes.forward;
    bytes.backward_passed += bytes.forward_passed;
  }
  return bytes;
}

}  // namespace

SchemeBytes scheme_bytes_sent(const SchemeCase& block, int rank) {
  const Terms t = terms_of(block, rank);
  const Exchange& x = t.inner;
  const Traffic& w = t.width;
  const std::int64_t round = t.e * t.outer.blocks_sent(w.round);
  return with_recomputation(
      t,
      {.forward = t.e * (x.to_heads(w.to_heads) + x.to_tokens(w.to_tokens) + x.gather_sent(w.gathered)) + round,
       .backward = t.e * (x.to_tokens(w.to_heads) + x.to_heads(w.to_tokens)) +
                   t.e_sum * (x.gather_received(w.gathered) + t.outer.sums_sent(w.round)) + round,
       .forward_passed = round,
       .backward_passed = t.e_sum * t.outer.sums_sent(w.round) + round},
      round);
}

SchemeBytes scheme_bytes_received(const SchemeCase& block, int rank) {
  const Terms t = terms_of(block, rank);
  const Exchange& x = t.inner;
  const Traffic& w = t.width;
  const std::int64_t round = t.e * t.outer.blocks_received(w.round);
  return with_recomputation(
      t,
      {.forward = t.e * (x.to_tokens(w.to_heads) + x.to_heads(w.to_tokens) + x.gather_received(w.gathered)) + round,
       .backward = t.e * (x.to_heads(w.to_heads) + x.to_tokens(w.to_tokens)) +
                   t.e_sum * (x.gather_sent(w.gathered) + t.outer.sums_received(w.round)) + round,
       .forward_passed = round,
       .backward_passed = t.e_sum * t.outer.sums_received(w.round) + round},
      round);
}

std::int64_t gradient_sync_bytes_sent(const Layout& layout, const ModelConfig& config, int rank) {
  constexpr std::int64_t kGradientBytes = 4;
  const SequenceLayout l = sequence_layout(layout);
  const auto reduced = [](std::int64_t elements, std::int64_t ranks, std::int64_t index) {
    const std::int64_t mine = balanced_part(elements, ranks, index).count;
    return ranks == 1 ? 0 : (elements - mine) + (ranks - 1) * mine;
  };
  const auto all_reduce = [&](std::int64_t elements) { return reduced(elements, l.num_ranks(), rank); };
  const std::int64_t D = config.hidden_size, h = config.num_attention_heads, q_lora = config.q_lora_rank;
  if (config.attention == AttentionKind::gqa) {
    const std::int64_t q = h * config.head_dim, kv = config.num_key_value_heads * config.head_dim;
    std::int64_t sum = all_reduce(D) + 2 * all_reduce(q * D) + 2 * all_reduce(kv * D);
    if (config.attention_bias) sum += all_reduce(q) + 2 * all_reduce(kv);
    if (config.attention_bias && config.model_type != "qwen2") sum += all_reduce(D);  // Qwen2 has none on o_proj
    return sum * kGradientBytes;
  }
  const std::int64_t queries = h * config.qk_head_dim();
  const std::int64_t kv_b = h * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank;
  std::int64_t elements = all_reduce(D);  // input_layernorm; tensor by tensor, as they are sent
  if (q_lora > 0) {
    elements += all_reduce(q_lora * D) + all_reduce(q_lora) + all_reduce(queries * q_lora);
  } else {
    elements += all_reduce(queries * D);
  }
  elements += all_reduce(config.latent_width() * D) + all_reduce(D * h * config.v_head_dim);
  if (config.kv_a_layernorm) elements += all_reduce(config.kv_lora_rank);
  if (config.attention_bias) {
    elements += (q_lora > 0 ? all_reduce(q_lora) : 0) + all_reduce(config.latent_width()) + all_reduce(D);
  }
  const bool own_heads = l.inner_ranks > 1 && traffic_of(l, config).gathered == config.latent_width();
  if (!own_heads) return (elements + all_reduce(kv_b)) * kGradientBytes;
  const std::int64_t mine = kv_b / l.inner_ranks;
  // Ranks of equal index in their inner groups, in order of rank.
  elements += reduced(mine, static_cast<std::int64_t>(l.outer_groups) * l.data_replicas, rank / l.inner_ranks);
  return (elements + (l.inner_ranks - 1) * mine) * kGradientBytes;
}

}  // namespace isomer
