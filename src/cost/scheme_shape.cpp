#include "cost/scheme_shape.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "cost/op_cost.h"

namespace isomer {

namespace {

/// Rows that latent-gather and latent-ring rebuild at a time, unless rows=N says otherwise: some 2^25 elements.
std::int64_t block_rows_of(const Layout& layout, std::int64_t width) {
  constexpr std::int64_t kElements = std::int64_t{1} << 25, kFewest = 512, kMost = 2048;
  const std::string text = layout.option("rows", "");
  std::int64_t given = 0;
  std::from_chars(text.data(), text.data() + text.size(), given);  // the scheme itself checks the option
  return given > 0 ? given : std::clamp(kElements / std::max<std::int64_t>(1, width), kFewest, kMost);
}

KeptKeys laga_keys(const Layout& layout) {
  const bool rebuild = layout.option("recompute", "none") == "up-projection";
  const std::string kv = layout.option("kv", rebuild ? "rebuild" : layout.option("v", "copy"));
  if (kv == "view") return KeptKeys::view;
  if (kv == "strided") return KeptKeys::strided;
  return kv == "rebuild" ? KeptKeys::rebuilt : KeptKeys::whole;
}

/// Exchanges, what is gathered and what is kept, by scheme.
void set_kind(SchemeShape& s, const Layout& layout) {
  const std::string& scheme = s.layout.scheme;
  const bool no_keys = layout.option("recompute", "none") == "up-projection";
  if (scheme == "explicit") {
    s.exchanges = 4;
  } else if (scheme == "explicit-shared-rope" && !s.grouped_query) {
    s.exchanges = 5;
    s.gathers_rope = true;
  } else if (scheme == "laga" && !s.grouped_query) {
    s.exchanges = 3;
    s.gathers_latent = true;
    s.keys = s.layout.outer == "latent-ring" ? KeptKeys::blocks : laga_keys(layout);
  } else if ((scheme == "absorbed" || scheme == "absorbed-two-product") && !s.grouped_query) {
    s.exchanges = 3;
    s.gathers_latent = true;
    s.keys = KeptKeys::latent;
    s.rope_apart = scheme == "absorbed-two-product";
  } else if (scheme == "ring") {
    s.keys = no_keys ? KeptKeys::rebuilt : KeptKeys::whole;
  } else if ((scheme == "latent-gather" || scheme == "latent-ring") && !s.grouped_query) {
    s.keys = KeptKeys::blocks;
    s.gathers_outside = scheme == "latent-gather";
    s.keeps_built_keys = s.gathers_outside && layout.option("kv", "streamed") == "kept";
  } else {
    invalid_argument("scheme '{}' has no closed forms of its work for {} attention", scheme,
                     s.grouped_query ? "grouped-query" : "latent");
  }
  const std::string& round = keeps_all_heads(scheme) ? scheme : s.layout.outer;
  s.passing = round == "ring" ? 2 : round == "latent-ring" ? 1 : 0;
}

void set_sizes(SchemeShape& s, const SchemeCase& block) {
  const ModelConfig& c = s.c;
  const auto real = [](std::int64_t i) { return static_cast<double>(i); };
  const KvHeadShards kv{s.grouped_query ? c.num_key_value_heads : c.num_attention_heads, s.layout.inner_ranks};
  s.own_rows = real(s.tokens.rows(s.rank));
  s.group_rows = real(s.tokens.group_rows(s.group));
  s.all_rows = real(s.tokens.total_rows());
  s.inner = s.layout.inner_ranks;
  s.groups = s.layout.outer_groups;
  s.heads = real(c.num_attention_heads);
  s.own_heads = s.heads / s.inner;
  s.kv_heads = real(kv.num_kv_heads);
  s.own_kv_heads = real(kv.per_rank());
  s.kv_copies = real(kv.copies());
  s.hidden = real(c.hidden_size);
  s.value_head = real(c.value_head_dim());
  s.latent = real(c.kv_lora_rank);
  s.rope = real(c.rope_dim());
  s.nope = real(c.qk_nope_head_dim);
  s.q_lora = real(c.q_lora_rank);
  const double head_key = s.grouped_query ? real(c.head_dim) : real(c.qk_head_dim());
  s.query_width = s.heads * head_key;
  s.key = s.is_absorbed() ? s.latent + s.rope : head_key;
  s.value = s.is_absorbed() ? s.latent : s.value_head;
  s.element = static_cast<double>(size_of(block.activations));
  s.statistic = block.activations == DType::f64 ? 8 : 4;
}

}  // namespace

SchemeShape::SchemeShape(const SchemeCase& block, int of_rank)
    : c(block.config),
      layout(sequence_layout(block.layout)),
      tokens(token_shards_of(block.layout, block.seq, block.batch)),
      rank(of_rank),
      group(tokens.group_of(of_rank)),
      grouped_query(block.config.attention == AttentionKind::gqa) {
  const std::string recompute = block.layout.option("recompute", "none");
  recomputes_attention = recompute == "attention";
  recomputes_block = recompute == "block";
  set_kind(*this, block.layout);
  set_sizes(*this, block);
  if (rebuilds_blocks()) {
    const std::int64_t width = c.num_attention_heads / layout.inner_ranks * (c.qk_nope_head_dim + c.v_head_dim);
    block_rows = block_rows_of(block.layout, width);
  }
}

double SchemeShape::passing_width() const {
  if (passing == 0) return 0;
  return passes_keys() ? own_kv_heads * (key + value) : latent + rope;
}

std::int64_t SchemeShape::pairs() const {
  std::int64_t pairs = 0;
  for (const IndexRange& range : tokens.group_positions(group)) {
    pairs += causal_pairs(range.begin, range.count, 0, tokens.seq);
  }
  return pairs * tokens.batch;
}

std::vector<KeyPart> key_parts(const SchemeShape& s) {
  const auto queries = s.tokens.group_positions(s.group);
  const std::int64_t batch = s.tokens.batch;
  std::vector<KeyPart> parts;
  const auto add = [&](int step, std::int64_t first_key, std::int64_t count) {
    std::int64_t seeing = 0;
    for (const IndexRange& range : queries) seeing += range.end() - std::clamp(first_key, range.begin, range.end());
    parts.push_back({step, static_cast<double>(count * batch), static_cast<double>(seeing * batch)});
  };
  const std::int64_t block = std::max<std::int64_t>(1, s.block_rows / batch);
  for (int step = 0; step < s.layout.outer_groups; ++step) {
    const auto ranges = s.tokens.group_positions(s.group_at(step));
    if (!s.rebuilds_blocks()) {
      if (!ranges.empty()) add(step, ranges.front().begin, s.tokens.group_count(s.group_at(step)));
      continue;
    }
    for (const IndexRange& range : ranges) {
      for (std::int64_t begin = 0; begin < range.count; begin += block) {
        add(step, range.begin + begin, std::min(block, range.count - begin));
      }
    }
  }
  return parts;
}

}  // namespace isomer
