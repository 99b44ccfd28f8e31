#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/sequence/recompute.h"
#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

struct Entry {
  std::string name;
  std::unique_ptr<SequenceScheme> (*make)(const Layout&);
  std::vector<std::string> options;  // beside `attention` and `recompute`
  std::vector<std::string> outer;    // second axes that it takes
};

const std::vector<Entry>& entries(AttentionKind kind) {
  // One a line, in the order of reports.
  // clang-format off
  static const std::vector<Entry> latent = {
      {"explicit", make_explicit, {}, {"ring"}},
      {"explicit-shared-rope", make_explicit_shared_rope, {}, {}},
      {"absorbed", make_absorbed, {}, {}},
      {"absorbed-two-product", make_absorbed_two_product, {}, {}},
      {"laga", make_laga, {"kv", "v"}, {"ring", "latent-ring"}},
      {"ring", make_ring, {}, {}},
      {"latent-gather", make_latent_gather, {"kv", "rows"}, {}},
      {"latent-ring", make_latent_ring, {"rows"}, {}},
  };
  static const std::vector<Entry> grouped_query = {
      {"explicit", make_explicit_gqa, {}, {"ring"}},
      {"ring", make_ring_gqa, {}, {}},
  };
  // clang-format on
  return kind == AttentionKind::mla ? latent : grouped_query;
}

std::vector<std::string> names_of(AttentionKind kind) {
  std::vector<std::string> list;
  for (const Entry& entry : entries(kind)) list.push_back(entry.name);
  return list;
}

const Entry& entry_of(const Layout& layout, AttentionKind kind) {
  const auto& name = layout.innermost().name;
  const auto& all = entries(kind);
  const auto found = std::find_if(all.begin(), all.end(), [&](const Entry& e) { return e.name == name; });
  if (found == all.end() && name == "dp") {
    invalid_argument("layout '{0}': dp is an axis beside a scheme, which stands first: {1}:1,{0}", to_string(layout),
                     all.front().name);
  }
  if (found == all.end()) {
    invalid_argument("scheme '{}' is unknown for {} attention; there are: {}", name,
                     kind == AttentionKind::mla ? "latent" : "grouped-query",
                     fmt::join(sequence_scheme_names(kind), ", "));
  }
  return *found;
}

/// The scheme whose file runs the layout: laga:P,latent-ring:G is a latent ring with inner ranks.
const Entry& runner_of(const Layout& layout, const SequenceLayout& axes, AttentionKind kind) {
  return axes.outer == "latent-ring" ? entry_of(parse_layout("latent-ring"), kind) : entry_of(layout, kind);
}

void check_recomputation(const Layout& layout, const Entry& entry, AttentionKind kind) {
  if (recompute_of(layout) != Recompute::up_projection) return;
  if (kind != AttentionKind::mla) {
    invalid_argument("layout '{}': recompute=up-projection is for latent attention; use recompute=attention or block",
                     to_string(layout));
  }
  if (entry.name == "laga" || entry.name == "ring") return;
  const bool rebuilt = entry.name == "latent-gather" || entry.name == "latent-ring";
  invalid_argument(
      "layout '{}': recompute=up-projection is for laga and ring; {} {}", to_string(layout), entry.name,
      rebuilt ? "rebuilds K and V anyhow" : "keeps no K and V that it could rebuild from the latent rows it holds");
}

void check_options(const Layout& layout, const Entry& entry) {
  for (const LayoutAxis& axis : layout.axes) {
    for (const auto& [key, value] : axis.options) {
      const bool known = key == "attention" || key == "recompute" ||
                         std::find(entry.options.begin(), entry.options.end(), key) != entry.options.end();
      if (!known) invalid_argument("layout '{}': {} has no option '{}'", to_string(layout), entry.name, key);
    }
  }
}

/// True for a scheme that only the other kind of attention has.
bool is_for_other_attention(const Layout& layout, AttentionKind kind) {
  const auto has = [&](AttentionKind k) {
    return std::any_of(entries(k).begin(), entries(k).end(),
                       [&](const Entry& e) { return e.name == layout.innermost().name; });
  };
  return !has(kind) && has(kind == AttentionKind::mla ? AttentionKind::gqa : AttentionKind::mla);
}

/// Divisors of `heads` up to it, as text.
std::string divisors(std::int64_t heads) {
  std::vector<std::int64_t> found;
  for (std::int64_t p = 1; p <= heads; ++p) {
    if (heads % p == 0) found.push_back(p);
  }
  return fmt::format("{}", fmt::join(found, ", "));
}

/// The largest number of inner ranks that divides ranks and heads and leaves more than one group.
int largest_inner(std::int64_t heads, int num_ranks) {
  for (int inner = num_ranks / 2; inner > 1; --inner) {
    if (num_ranks % inner == 0 && heads % inner == 0) return inner;
  }
  return 1;
}

/// What runs on ranks that don't divide the heads.
std::string beyond_heads(const ModelConfig& config, int num_ranks) {
  const int inner = largest_inner(config.num_attention_heads, num_ranks);
  const std::string alone = fmt::format("ring:{}", num_ranks);
  if (config.attention != AttentionKind::mla) {
    return inner == 1 ? alone : fmt::format("explicit:{},ring:{}, {}", inner, num_ranks / inner, alone);
  }
  const std::string latent = fmt::format("{}, latent-gather:{}, latent-ring:{}", alone, num_ranks, num_ranks);
  return inner == 1 ? latent : fmt::format("laga:{},ring:{}, {}", inner, num_ranks / inner, latent);
}

/// Schemes that see keys part by part.
bool merges_parts(const SequenceLayout& axes) { return keeps_all_heads(axes.scheme) || axes.outer_groups > 1; }

}  // namespace

std::vector<Layout> all_sequence_layouts(const ModelConfig& config, int num_ranks) {
  std::vector<Layout> layouts;
  for (const Entry& entry : entries(config.attention)) layouts.push_back(parse_layout(entry.name));
  const int inner = largest_inner(config.num_attention_heads, num_ranks);
  for (const std::string_view outer : {"ring", "latent-ring"}) {
    for (const Entry& entry : entries(config.attention)) {
      if (inner == 1) break;
      if (std::find(entry.outer.begin(), entry.outer.end(), outer) == entry.outer.end()) continue;
      layouts.push_back(parse_layout(fmt::format("{}:{},{}:{}", entry.name, inner, outer, num_ranks / inner)));
    }
  }
  for (const AttentionKind other : {AttentionKind::mla, AttentionKind::gqa}) {
    for (const Entry& entry : entries(other)) {  // reported as omitted, with the reason
      const Layout layout = parse_layout(entry.name);
      if (is_for_other_attention(layout, config.attention)) layouts.push_back(layout);
    }
  }
  return layouts;
}

const std::vector<std::string>& sequence_scheme_names(AttentionKind kind) {
  static const std::vector<std::string> latent = names_of(AttentionKind::mla);
  static const std::vector<std::string> grouped_query = names_of(AttentionKind::gqa);
  return kind == AttentionKind::mla ? latent : grouped_query;
}

std::unique_ptr<SequenceScheme> make_sequence_scheme(const Layout& layout, const ModelConfig& config) {
  const Entry& entry = entry_of(layout, config.attention);
  const SequenceLayout axes = sequence_layout(layout);
  if (!axes.outer.empty() && std::find(entry.outer.begin(), entry.outer.end(), axes.outer) == entry.outer.end()) {
    invalid_argument("layout '{}': {} takes no axis '{}'", to_string(layout), entry.name, axes.outer);
  }
  const Entry& runner = runner_of(layout, axes, config.attention);
  check_options(layout, runner);
  check_recomputation(layout, runner, config.attention);
  if (recompute_of(layout) == Recompute::block) return recompute_block(runner.make(layout));
  return runner.make(layout);
}

std::string why_unfit(const Layout& layout, const ModelConfig& config, int num_ranks, std::int64_t seq,
                      AttentionCore core) {
  if (is_for_other_attention(layout, config.attention)) {
    const bool latent = config.attention == AttentionKind::mla;
    return fmt::format("it is a scheme for {} attention; {} has {} attention", latent ? "grouped-query" : "latent",
                       config.name, latent ? "latent" : "grouped-query");
  }
  entry_of(layout, config.attention);
  SequenceLayout axes;
  try {
    axes = sequence_layout(layout, num_ranks);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  const std::int64_t heads = config.num_attention_heads;
  if (heads % axes.inner_ranks != 0) {
    return fmt::format(
        "{} ranks don't divide {} heads, which are spread over them; these numbers of ranks do: {}. What runs on "
        "{}: {}",
        axes.inner_ranks, heads, divisors(heads), axes.inner_ranks, beyond_heads(config, axes.inner_ranks));
  }
  if (core == AttentionCore::eager && merges_parts(axes)) {
    return "attention=eager keeps whole score matrices, and what passes round or is gathered is merged part by part; "
           "use "
           "attention=fused";
  }
  if (seq < axes.sequence_ranks())
    return fmt::format("{} tokens leave some of {} ranks without any; it takes a token a rank at least", seq,
                       axes.sequence_ranks());
  return {};
}

}  // namespace isomer
