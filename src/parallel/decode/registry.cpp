#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/decode/stages.h"

namespace isomer {

namespace {

struct Entry {
  DecodeScheme scheme;
  std::unique_ptr<StepScheme> (*make)(const SchemeArguments&);
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> list = {
      {DecodeScheme::tp, make_tp},      {DecodeScheme::gla, make_gla},
      {DecodeScheme::tpla, make_tpla},  {DecodeScheme::exact_latent, make_exact_latent},
      {DecodeScheme::kvp, make_kvp},    {DecodeScheme::medha, make_medha},
      {DecodeScheme::helix, make_helix}};
  return list;
}

const Entry* entry_of(const DecodeLayout& layout) {
  const auto found = std::find_if(entries().begin(), entries().end(),
                                  [&](const Entry& entry) { return entry.scheme == layout.shards.scheme; });
  return found == entries().end() ? nullptr : &*found;
}

/// A view of the rank's part; undefined where it has none.
Tensor cut(const Tensor& tensor, const std::optional<WeightSlice>& slice) {
  if (!slice) return tensor;
  return slice->range.count == 0 ? Tensor() : tensor.slice(slice->axis, slice->range.begin, slice->range.count);
}

/// Whether a rank caches a part of the latent's columns.
bool cuts_latent(const DecodeShards& s) {
  return s.scheme == DecodeScheme::gla || s.scheme == DecodeScheme::tpla || s.scheme == DecodeScheme::exact_latent;
}

/// Whether heads are dealt to columns (tpa), and every column's sequence to slices (kvp).
bool has_columns(const DecodeShards& s) { return s.scheme == DecodeScheme::helix || s.scheme == DecodeScheme::medha; }

/// TPF · EP is what the ranks of the FFN are: those of the attention, or under medha its columns.
std::string why_ffn_ranks_unfit(const DecodeShards& s, const ModelConfig& c) {
  const bool medha = s.scheme == DecodeScheme::medha;
  const int ranks = medha ? s.tpa : s.devices();
  if (s.tpf * s.ep == ranks) return {};
  std::vector<std::string> fitting;
  for (int ep = 1; ep <= ranks; ++ep) {
    if (ranks % ep == 0 && why_ffn_unfit(c, ranks / ep, ep).empty())
      fitting.push_back(fmt::format("tpf={},ep={}", ranks / ep, ep));
  }
  return fmt::format("tpf={} and ep={} are {} ranks, the attention has {}{}: their product must be that{}{}", s.tpf,
                     s.ep, s.tpf * s.ep, ranks, medha ? " columns, to which the FFN is tied" : "",
                     fitting.empty() ? "" : "; these fit: ", fmt::join(fitting, "; "));
}

std::string why_latent_unfit(const DecodeShards& s, const ModelConfig& c) {
  if (!cuts_latent(s)) return {};
  if (c.attention != AttentionKind::mla) {
    return fmt::format("it cuts the latent, and the attention of {} is grouped-query, without one; take tp or kvp",
                       c.name);
  }
  const std::int64_t split = c.kv_lora_rank - s.shared_columns;
  if (split < 0 || split % s.latent_shards != 0) {
    return fmt::format("{} columns (kv_lora_rank {} less {} shared) don't divide by {} shards; take a g that divides",
                       split, c.kv_lora_rank, s.shared_columns, s.latent_shards);
  }
  if (!s.whole_rope && c.qk_rope_head_dim % s.latent_shards != 0) {
    return fmt::format("a rope key of {} columns does not divide by {} shards; take rope=whole", c.qk_rope_head_dim,
                       s.latent_shards);
  }
  return {};
}

/// W_UK and W_UV stand between queries, outputs and the latent; keys and values of heads need neither.
std::string why_up_projection_unfit(const DecodeShards& s, const ModelConfig& c) {
  if (c.attention == AttentionKind::mla || (!s.absorb_before && !s.values_before)) return {};
  return fmt::format(
      "{}: it says when latent attention is up-projected, and the attention of {} is grouped-query; leave it out",
      s.absorb_before ? "absorb=before" : "wuv=before", c.name);
}

std::string why_tpla_unfit(const DecodeShards& s, const ModelConfig& c, const TplaModel* tpla) {
  if (s.scheme != DecodeScheme::tpla) return {};
  if (tpla == nullptr) {
    return fmt::format(
        "{} has no side file of a conversion (tpla.json), which says how its latent is cut; make such a "
        "checkpoint with isomer convert tpla --shards {}",
        c.name, s.latent_shards);
  }
  const TplaOptions& o = tpla->options;
  if (o.num_shards != s.latent_shards || o.shared_columns != s.shared_columns) {
    return fmt::format("{} was converted for {} shards and {} shared columns, the layout has {} and {}; take g={}",
                       c.name, o.num_shards, o.shared_columns, s.latent_shards, s.shared_columns, o.num_shards);
  }
  if (s.split_latent_rows)
    return "rms=reduce is priced by the planner alone; leave it out (W_kv_a whole on every rank)";
  if (s.scatter_values && s.tpa != s.latent_shards) {
    return fmt::format("wo=scatter deals heads over the shards, which goes with tp=1; it has tp={}",
                       s.tpa / s.latent_shards);
  }
  return {};
}

/// Every shard of a cut latent has all heads of its column in decode, and in prefill they are dealt as they go.
std::string why_layout_heads_unfit(const DecodeShards& s, const ModelConfig& c) {
  if (has_columns(s)) return why_columns_unfit(c, s.kvp, s.tpa);
  const bool all_heads = s.scheme == DecodeScheme::tpla || s.scheme == DecodeScheme::exact_latent;
  if (!all_heads || s.scatter_values) return why_heads_unfit(c, s.group());
  if (s.group() > c.num_attention_heads) {
    return fmt::format("{} ranks are more than the {} heads of {}, of which each prefills at least one", s.group(),
                       c.num_attention_heads, c.name);
  }
  return why_heads_unfit(c, s.tpa / s.latent_shards);
}

bool same_split(const WeightSplit& a, const WeightSplit& b) {
  return a.head_parts == b.head_parts && a.head_part == b.head_part && a.split_kv_heads == b.split_kv_heads &&
         a.heads.has_value() == b.heads.has_value() &&
         (!a.heads || (a.heads->query.begin == b.heads->query.begin && a.heads->query.count == b.heads->query.count)) &&
         a.ffn_parts == b.ffn_parts && a.ffn_part == b.ffn_part && a.expert_parts == b.expert_parts &&
         a.whole_shared_experts == b.whole_shared_experts;
}

ModelPart cut_part(const ModelConfig& config, const ModelWeights& weights, const WeightSplit& split) {
  ModelPart part{.local = config, .weights = weights, .split = split};
  part.local.num_attention_heads = query_heads_of(config, split).count;
  part.weights.for_each([&](const std::string& name, Tensor& tensor) {
    tensor = cut(tensor, slice_of_weight(config, name, tensor.size(0), tensor.size(-1), split));
  });
  return part;
}

}  // namespace

const std::vector<std::string>& step_scheme_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Entry& entry : entries()) list.emplace_back(name_of(entry.scheme));
    list.insert(list.end(), {"dp-ep", "pp"});
    return list;
  }();
  return names;
}

DecodeLayout complete_layout(DecodeLayout layout, const TplaModel* tpla) {
  DecodeShards& s = layout.shards;
  if (s.scheme == DecodeScheme::tpla && tpla != nullptr && s.shared_columns == 0) {
    s.shared_columns = tpla->options.shared_columns;
  }
  return layout;
}

std::string why_step_unfit(const DecodeLayout& layout, const ModelConfig& config, const TplaModel* tpla) {
  const DecodeShards& s = layout.shards;
  if (entry_of(layout) == nullptr || (s.data_parallel > 1 && (s.group() > 1 || layout.pp > 1))) {
    return fmt::format("the engine does not run it (the planner prices it); there are: {}",
                       fmt::join(step_scheme_names(), ", "));
  }
  if (layout.pp > config.num_hidden_layers) {
    return fmt::format("a pipeline of {} stages needs a layer for each, {} has {}; take at most {}", layout.pp,
                       config.name, config.num_hidden_layers, config.num_hidden_layers);
  }
  if (std::string reason = why_latent_unfit(s, config); !reason.empty()) return reason;
  if (std::string reason = why_up_projection_unfit(s, config); !reason.empty()) return reason;
  if (std::string reason = why_tpla_unfit(s, config, tpla); !reason.empty()) return reason;
  std::string reason_of_heads = why_layout_heads_unfit(s, config);
  if (!reason_of_heads.empty()) return reason_of_heads;
  if (std::string reason = why_ffn_ranks_unfit(s, config); !reason.empty()) return reason;
  if (s.data_parallel > 1 && s.tpf > 1 && s.ep > 1) {
    return fmt::format(
        "with sequences of their own ranks split the experts or the width, not both; take ep={} or tpf={}", s.devices(),
        s.devices());
  }
  std::string reason = why_ffn_unfit(config, s.tpf, s.ep);
  if (!reason.empty() && s.data_parallel > 1 && s.ep > 1) {
    reason += fmt::format(", or cut columns: dp-ep:{0},tpf={0}", s.devices());
  }
  return reason;
}

std::unique_ptr<StepScheme> make_step_scheme(const SchemeArguments& arguments) {
  const std::string reason = why_step_unfit(arguments.layout, arguments.config, arguments.tpla);
  if (!reason.empty()) invalid_argument("layout '{}': {}", to_string(arguments.layout), reason);
  if (arguments.layout.shards.data_parallel > 1) return make_dp_ep(arguments);
  return entry_of(arguments.layout)->make(arguments);
}

DecodeModel cut_model(const ModelConfig& config, const ModelWeights& weights, const StepScheme& scheme, int rank) {
  const WeightSplit prefill = scheme.explicit_split(rank), decode = scheme.absorbed_split(rank);
  DecodeModel model{.config = config, .explicit_part = cut_part(config, weights, prefill), .absorbed_part = {}};
  model.absorbed_part = same_split(decode, prefill) ? model.explicit_part : cut_part(config, weights, decode);
  return model;
}

std::string cache_copies_note(const DecodeLayout& layout, const ModelConfig& config) {
  const DecodeShards& s = layout.shards;
  const bool latent = config.attention == AttentionKind::mla;
  const std::int64_t heads = latent ? 1 : config.num_key_value_heads;
  if (cuts_latent(s) || s.tpa <= heads) return {};
  return fmt::format("the cache stands {:.3g} times: {} of {} ranks splits query heads beyond the {} that {} has",
                     static_cast<double>(s.tpa) / static_cast<double>(heads), has_columns(s) ? "tpa" : "tp", s.tpa,
                     latent ? "one latent row" : fmt::format("{} KV heads", heads), config.name);
}

WeightSplit even_split(const DecodeLayout& layout, int rank, bool split_kv_heads) {
  const DecodeShards& s = layout.shards;
  return {.head_parts = s.group(),
          .head_part = rank,
          .split_kv_heads = split_kv_heads,
          .ffn_parts = s.group(),
          .ffn_part = rank,
          .expert_parts = s.ep};
}

WeightSplit dealt_split(const DecodeLayout& layout, const ModelConfig& config, int rank) {
  WeightSplit split = even_split(layout, rank, true);
  split.heads = column_heads_of(config, layout.shards.group(), rank);
  return split;
}

CacheShards cache_shards_of(const DecodeLayout& layout) { return {layout.shards.kvp, layout.shards.chunk}; }

RankCache rank_cache_of(const DecodeLayout& layout, const ModelConfig& config, int rank) {
  const DecodeShards& s = layout.shards;
  RankCache cache{.shards = cache_shards_of(layout), .slice = rank % s.group() / s.tpa};
  if (config.attention == AttentionKind::gqa) {
    cache.kv_heads = has_columns(s) ? column_heads_of(config, s.tpa, rank % s.tpa).kv
                                    : kv_heads_of(config, {.head_parts = s.tpa, .head_part = rank % s.tpa});
    return cache;
  }
  if (!cuts_latent(s)) {
    cache.columns = {{0, config.latent_width()}};
    return cache;
  }
  const std::int64_t d = config.kv_lora_rank, r = config.qk_rope_head_dim, m = s.shared_columns;
  const std::int64_t g = s.latent_shards, shard = rank % g, width = (d - m) / g;
  const IndexRange rope = s.whole_rope ? IndexRange{d, r} : IndexRange{d + shard * (r / g), r / g};
  for (const IndexRange& range : {IndexRange{0, m}, IndexRange{m + shard * width, width}, rope}) {
    if (range.count > 0) cache.columns.push_back(range);
  }
  return cache;
}

CacheRowShape cache_row_shape(const ModelConfig& config, const RankCache& cache) {
  if (config.attention == AttentionKind::gqa) {
    return {cache.kv_heads.count, config.head_dim, config.head_dim, false};
  }
  CacheRowShape row{.num_heads = 1, .values_are_key_parts = true};
  for (const IndexRange& range : cache.columns) {
    row.key_width += range.count;
    row.value_width += std::clamp<std::int64_t>(config.kv_lora_rank - range.begin, 0, range.count);
  }
  return row;
}

Tensor StepScheme::ffn(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  return decode_ffn(ctx, block, x);
}

}  // namespace isomer
