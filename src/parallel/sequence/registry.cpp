#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

struct Entry {
  std::string name;
  std::unique_ptr<SequenceScheme> (*make)(const Layout&);
  std::vector<std::string> options;  // beside `attention`
  std::vector<std::string> outer;    // second axes that it takes
};

const std::vector<Entry>& entries(AttentionKind kind) {
  static const std::vector<Entry> latent = {
      {"explicit", make_explicit, {}, {}}, {"explicit-shared-rope", make_explicit_shared_rope, {}, {}},
      {"absorbed", make_absorbed, {}, {}}, {"absorbed-two-product", make_absorbed_two_product, {}, {}},
      {"laga", make_laga, {"v"}, {}},
  };
  static const std::vector<Entry> grouped_query = {
      {"explicit", make_explicit_gqa, {}, {}},
  };
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
  if (found == all.end()) {
    invalid_argument("scheme '{}' is unknown for {} attention; there are: {}", name,
                     kind == AttentionKind::mla ? "latent" : "grouped-query",
                     fmt::join(sequence_scheme_names(kind), ", "));
  }
  return *found;
}

void check_options(const Layout& layout, const Entry& entry) {
  for (const LayoutAxis& axis : layout.axes) {
    for (const auto& [key, value] : axis.options) {
      const bool known =
          key == "attention" || std::find(entry.options.begin(), entry.options.end(), key) != entry.options.end();
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

}  // namespace

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
  check_options(layout, entry);
  return entry.make(layout);
}

std::string why_unfit(const Layout& layout, const ModelConfig& config, int num_ranks, std::int64_t seq) {
  if (is_for_other_attention(layout, config.attention)) {
    const bool latent = config.attention == AttentionKind::mla;
    return fmt::format("'{}' is a scheme for {} attention; {} has {}", to_string(layout),
                       latent ? "grouped-query" : "latent", config.name, latent ? "latent" : "grouped-query");
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
    return fmt::format("{} ranks don't divide {} heads, which are spread over them; these numbers of ranks do: {}",
                       axes.inner_ranks, heads, divisors(heads));
  }
  if (seq < axes.sequence_ranks())
    return fmt::format("{} tokens leave some of {} ranks without any; it takes a token a rank at least", seq,
                       axes.sequence_ranks());
  return {};
}

}  // namespace isomer
