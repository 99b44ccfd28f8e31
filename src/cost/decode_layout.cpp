#include "cost/decode_layout.h"

#include <fmt/ranges.h>

#include <charconv>

#include "core/error.h"
#include "core/near_names.h"
#include "sharding/layout.h"
#include "sharding/tokens.h"

namespace isomer {

namespace {

constexpr int kMaxAxis = 1 << 20;

bool uses_slices(DecodeScheme scheme) {
  return scheme == DecodeScheme::kvp || scheme == DecodeScheme::medha || scheme == DecodeScheme::helix;
}

DecodeScheme scheme_of(const std::string& name) {
  std::vector<std::string> names;
  for (int i = 0; i <= static_cast<int>(DecodeScheme::helix); ++i) {
    const auto scheme = static_cast<DecodeScheme>(i);
    if (name_of(scheme) == name) return scheme;
    names.emplace_back(name_of(scheme));
  }
  names.emplace_back("dp-ep");
  const auto near = near_names(name, names);
  const std::string hint =
      near.empty() ? "; there are" : fmt::format("; did you mean {}? There are", fmt::join(near, " or "));
  invalid_argument("decode layout '{}' is unknown{}: {}, and pp behind any of them", name, hint,
                   fmt::join(names, ", "));
}

/// The options of one axis, each asked for once; what is left over is unknown.
class AxisOptions {
 public:
  explicit AxisOptions(const LayoutAxis& axis) : axis_(axis), left_(axis.options) {}

  int size(const char* key, int fallback) {
    known_.emplace_back(key);
    const auto found = left_.find(key);
    if (found == left_.end()) return fallback;
    const std::string text = found->second;
    left_.erase(found);
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > kMaxAxis) {
      invalid_argument("{}: {}={}: it takes a whole number from 1 to {}", axis_.name, key, text, kMaxAxis);
    }
    return value;
  }
  /// True for `yes`, false for `no`, the first of which is the default.
  bool word(const char* key, const char* no, const char* yes) {
    known_.emplace_back(key);
    const auto found = left_.find(key);
    if (found == left_.end()) return false;
    const std::string text = found->second;
    left_.erase(found);
    if (text != no && text != yes)
      invalid_argument("{}: {}={}: it takes {}={} or {}={}", axis_.name, key, text, key, no, key, yes);
    return text == yes;
  }
  void finish() const {
    if (left_.empty()) return;
    invalid_argument("{} has no option '{}'; it has: {}", axis_.name, left_.begin()->first, fmt::join(known_, ", "));
  }

 private:
  const LayoutAxis& axis_;
  std::map<std::string, std::string> left_;
  std::vector<std::string> known_;
};

/// Sizes and options of the attention axis.
void read_attention(const LayoutAxis& axis, AxisOptions& options, DecodeLayout& layout) {
  DecodeShards& s = layout.shards;
  s.scheme = scheme_of(axis.name);
  const int whole = axis.size > 0 ? axis.size : 1;
  switch (s.scheme) {
    case DecodeScheme::tp: s.tpa = whole; break;
    case DecodeScheme::gla:
    case DecodeScheme::tpla:
      s.latent_shards = options.size("g", axis.size > 0 ? axis.size : 2);
      s.tpa = s.latent_shards * options.size("tp", 1);
      s.shared_columns = options.size("m", 0);
      s.split_latent_rows = options.word("rms", "replicate", "reduce");
      s.scatter_values = options.word("wo", "replicate", "scatter");
      break;
    case DecodeScheme::exact_latent:
      s.latent_shards = s.tpa = whole;
      s.whole_rope = !options.word("rope", "whole", "split");
      break;
    case DecodeScheme::kvp: s.kvp = whole; break;
    case DecodeScheme::medha:
    case DecodeScheme::helix:
      s.kvp = options.size("kvp", whole);
      s.tpa = options.size("tpa", 1);
      break;
  }
  if (s.scheme == DecodeScheme::helix) {
    s.gather_queries = options.word("q", "replicate", "gather");
    s.absorb_before = options.word("absorb", "after", "before");
    if (s.absorb_before && !s.gather_queries) {
      invalid_argument("helix: absorb=before: queries travel with q=gather alone; add it, or leave absorb out");
    }
    s.gather_experts = options.word("experts", "all-reduce", "gather");
    layout.hop_b = !options.word("hopb", "on", "off");
  }
  if (uses_slices(s.scheme)) s.chunk = options.size("chunk", static_cast<int>(DecodeShards{}.chunk));
  if (uses_slices(s.scheme) && s.scheme != DecodeScheme::kvp) s.values_before = options.word("wuv", "after", "before");
}

/// TPF and EP: as said, or all devices of a stage by columns. dp-ep spreads experts where there are any.
void read_ffn(const ModelConfig& config, int tpf, int ep, DecodeShards& s) {
  const int devices = s.scheme == DecodeScheme::medha ? s.tpa : s.devices();
  if (ep == 0 && tpf == 0) ep = s.data_parallel > 1 && config.moe.n_routed_experts > 0 ? devices : 1;
  if (ep == 0) ep = std::max(1, devices / tpf);
  if (tpf == 0) tpf = std::max(1, devices / ep);
  s.tpf = tpf;
  s.ep = ep;
}

std::string chunk_text(const DecodeShards& s) {
  return s.chunk == DecodeShards{}.chunk ? "" : fmt::format(",chunk={}", s.chunk);
}

std::string attention_text(const DecodeLayout& layout) {
  const DecodeShards& s = layout.shards;
  std::string text;
  switch (s.scheme) {
    case DecodeScheme::tp: return fmt::format("tp:{}", s.tpa);
    case DecodeScheme::kvp: return fmt::format("kvp:{}{}", s.kvp, chunk_text(s));
    case DecodeScheme::exact_latent: return fmt::format("exact-latent:{}{}", s.tpa, s.whole_rope ? "" : ",rope=split");
    case DecodeScheme::gla:
    case DecodeScheme::tpla:
      text = fmt::format("{}:g={},tp={}", name_of(s.scheme), s.latent_shards, s.tpa / s.latent_shards);
      if (s.shared_columns > 0) text += fmt::format(",m={}", s.shared_columns);
      if (s.split_latent_rows) text += ",rms=reduce";
      if (s.scatter_values) text += ",wo=scatter";
      return text;
    case DecodeScheme::medha:
    case DecodeScheme::helix: break;
  }
  const bool helix = s.scheme == DecodeScheme::helix;
  text = fmt::format("{}:kvp={},tpa={}", name_of(s.scheme), s.kvp, s.tpa);
  if (helix && s.data_parallel == 1) text += fmt::format(",tpf={},ep={}", s.tpf, s.ep);
  if (s.gather_queries) text += ",q=gather";
  if (s.absorb_before) text += ",absorb=before";
  if (s.values_before) text += ",wuv=before";
  if (s.gather_experts) text += ",experts=gather";
  if (helix && !layout.hop_b) text += ",hopb=off";
  text += chunk_text(s);
  return text;
}

}  // namespace

std::string_view DecodeLayout::family() const {
  return shards.data_parallel > 1 && shards.group() == 1 ? "dp-ep" : name_of(shards.scheme);
}

std::string to_string(const DecodeLayout& layout) {
  const DecodeShards& s = layout.shards;
  std::string text;
  if (s.group() > 1 || s.data_parallel == 1) text = attention_text(layout);
  if (s.data_parallel > 1) {
    text += fmt::format("{}dp-ep:{}", text.empty() ? "" : ",", s.data_parallel);
    if (s.ep == 1) text += fmt::format(",tpf={}", s.tpf);
    if (s.ep > 1 && s.ep < s.devices()) text += fmt::format(",ep={}", s.ep);  // all of them is what dp-ep means
  } else if (s.ep > 1 && s.scheme != DecodeScheme::helix) {
    text += fmt::format(",ep={}", s.ep);
  }
  if (layout.pp > 1) text += fmt::format(",pp:{}", layout.pp);
  return text;
}

DecodeLayout parse_decode_layout(std::string_view text, const ModelConfig& config) {
  const Layout parsed = parse_layout(text, "helix:kvp=2,tpa=1");
  DecodeLayout layout;
  int tpf = 0, ep = 0;
  std::size_t next = 0;
  const auto read_axis_ffn = [&](AxisOptions& options) {
    tpf = options.size("tpf", tpf);
    ep = options.size("ep", ep);
    options.finish();
  };
  if (const LayoutAxis& axis = parsed.axes.front(); axis.name != "dp-ep" && axis.name != "pp") {
    AxisOptions options(axis);
    read_attention(axis, options, layout);
    read_axis_ffn(options);
    ++next;
  }
  for (const std::string_view name : {"dp-ep", "pp"}) {
    if (next >= parsed.axes.size() || parsed.axes[next].name != name) continue;
    const LayoutAxis& axis = parsed.axes[next++];
    if (axis.size < 1) invalid_argument("layout '{}': {} takes a number of devices, such as {}:4", text, name, name);
    AxisOptions options(axis);
    (name == "pp" ? layout.pp : layout.shards.data_parallel) = axis.size;
    read_axis_ffn(options);
  }
  if (next < parsed.axes.size()) {
    invalid_argument("layout '{}': '{}' is out of place; an attention axis, then dp-ep, then pp", text,
                     parsed.axes[next].name);
  }
  read_ffn(config, tpf, ep, layout.shards);
  return layout;
}

std::string_view reason_of(Unfit unfit) {
  switch (unfit) {
    case Unfit::fits: return "fits";
    case Unfit::attention_kind: return "the latent is cut, and the model has none";
    case Unfit::heads: return "heads do not divide by the devices that split them, or are fewer";
    case Unfit::latent: return "the latent does not divide by its shards";
    case Unfit::experts: return "experts do not divide by EP";
    case Unfit::ffn_width: return "the FFN's width is below the number of devices that split it";
    case Unfit::ffn_devices: return "TPF·EP is not the number of attention devices, or mixes with DP attention";
    case Unfit::layers: return "fewer layers than pipeline stages";
    case Unfit::batch: return "the batch does not divide by DP·PP";
    case Unfit::context: return "fewer cached tokens than slices";
    case Unfit::memory: return "weights, cache and workspace exceed a device's memory";
  }
  return "";
}

namespace {

/// Helix and Medha deal heads as they go, at least one to each device; shards of a latent have all heads of their
/// column; the others cut them evenly.
bool heads_fit(const DecodeShards& s, const ModelConfig& c) {
  const bool all_heads = s.scheme == DecodeScheme::tpla || s.scheme == DecodeScheme::exact_latent;
  if (all_heads && !s.scatter_values) {
    return s.group() <= c.num_attention_heads && c.num_attention_heads % (s.tpa / s.latent_shards) == 0;
  }
  if (s.scheme != DecodeScheme::helix && s.scheme != DecodeScheme::medha) return c.num_attention_heads % s.group() == 0;
  if (s.tpa > c.num_attention_heads) return false;
  const std::int64_t kv = c.attention == AttentionKind::mla ? c.num_attention_heads : c.num_key_value_heads;
  for (int column = 0; column < s.tpa; ++column) {
    if (grouped_heads(c.num_attention_heads, kv, s.tpa, column).query.count < s.kvp) return false;
  }
  return true;
}

}  // namespace

Unfit why_unfit(const DecodeLayout& layout, const ModelConfig& c) {
  const DecodeShards& s = layout.shards;
  const bool moe = c.moe.n_routed_experts > 0;
  const bool cuts_latent = s.latent_shards > 1 || s.scheme == DecodeScheme::gla || s.scheme == DecodeScheme::tpla ||
                           s.scheme == DecodeScheme::exact_latent;
  if (cuts_latent && c.attention != AttentionKind::mla) return Unfit::attention_kind;
  if (!heads_fit(s, c)) return Unfit::heads;
  if (cuts_latent && (c.kv_lora_rank - s.shared_columns) % s.latent_shards != 0) return Unfit::latent;
  if (cuts_latent && !s.whole_rope && c.qk_rope_head_dim % s.latent_shards != 0) return Unfit::latent;
  if (s.scatter_values && s.latent_shards != s.tpa) return Unfit::latent;
  if (s.ep > 1 && (!moe || c.moe.n_routed_experts % s.ep != 0)) return Unfit::experts;
  const int ffn_devices = s.scheme == DecodeScheme::medha ? s.tpa : s.devices();
  if (s.tpf * s.ep != ffn_devices) return Unfit::ffn_devices;
  // Data-parallel groups either own whole experts or cut every matrix; a mixture has no exchange defined for it.
  if (s.data_parallel > 1 && s.tpf > 1 && s.ep > 1) return Unfit::ffn_devices;
  if (s.scheme == DecodeScheme::medha && s.data_parallel > 1) return Unfit::ffn_devices;
  if (moe && c.moe.moe_intermediate_size < s.tpf) return Unfit::ffn_width;
  const bool has_dense = !moe || c.moe.first_k_dense_replace > 0;
  if (has_dense && c.intermediate_size < ffn_devices) return Unfit::ffn_width;
  if (c.num_hidden_layers < layout.pp) return Unfit::layers;
  return Unfit::fits;
}

}  // namespace isomer
