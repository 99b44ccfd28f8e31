#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/sequence/scheme.h"

namespace isomer {

namespace {

struct Entry {
  std::string name;
  std::unique_ptr<SequenceScheme> (*make)(const LayoutAxis&);
  std::vector<std::string> options;  // beside `attention`
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = {
      {"explicit", make_explicit, {}}, {"explicit-shared-rope", make_explicit_shared_rope, {}},
      {"absorbed", make_absorbed, {}}, {"absorbed-two-product", make_absorbed_two_product, {}},
      {"laga", make_laga, {"v"}},
  };
  return all;
}

const Entry& entry_of(const Layout& layout) {
  const auto& name = layout.innermost().name;
  const auto found = std::find_if(entries().begin(), entries().end(), [&](const Entry& e) { return e.name == name; });
  if (found == entries().end()) {
    invalid_argument("scheme '{}' is unknown; there are: {}", name, fmt::join(sequence_scheme_names(), ", "));
  }
  return *found;
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

const std::vector<std::string>& sequence_scheme_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Entry& entry : entries()) list.push_back(entry.name);
    return list;
  }();
  return names;
}

std::unique_ptr<SequenceScheme> make_sequence_scheme(const Layout& layout) {
  const Entry& entry = entry_of(layout);
  if (layout.axes.size() > 1) {
    invalid_argument("layout '{}': {} takes no second axis ('{}')", to_string(layout), entry.name, layout.axes[1].name);
  }
  for (const auto& [key, value] : layout.innermost().options) {
    const bool known =
        key == "attention" || std::find(entry.options.begin(), entry.options.end(), key) != entry.options.end();
    if (!known) invalid_argument("layout '{}': {} has no option '{}'", to_string(layout), entry.name, key);
  }
  return entry.make(layout.innermost());
}

std::string why_unfit(const Layout& layout, const ModelConfig& config, int num_ranks, std::int64_t seq) {
  if (const int size = layout.innermost().size; size != 0 && size != num_ranks) {
    return fmt::format("'{}' has {} ranks, the run has {}", to_string(layout), size, num_ranks);
  }
  const std::int64_t heads = config.num_attention_heads;
  if (heads % num_ranks != 0) {
    return fmt::format("{} ranks don't divide {} heads, which are spread over them; these numbers of ranks do: {}",
                       num_ranks, heads, divisors(heads));
  }
  if (seq < num_ranks)
    return fmt::format("{} tokens leave some of {} ranks without any; it takes a token a rank at least", seq,
                       num_ranks);
  return {};
}

}  // namespace isomer
