#include "sharding/sequence_layout.h"

#include "core/error.h"

namespace isomer {

namespace {

constexpr std::string_view kDataAxis = "dp";

bool passes_round(std::string_view axis) { return axis == "ring" || axis == "latent-ring"; }

int size_or_one(const LayoutAxis& axis) { return axis.size == 0 ? 1 : axis.size; }

}  // namespace

bool keeps_all_heads(std::string_view scheme) { return passes_round(scheme) || scheme == "latent-gather"; }

Layout sized_layout(const Layout& layout, int num_ranks) {
  Layout sized = layout;
  std::int64_t product = 1;
  LayoutAxis* open = nullptr;
  for (LayoutAxis& axis : sized.axes) {
    product *= size_or_one(axis);
    if (axis.size != 0) continue;
    if (open != nullptr && num_ranks != 0)
      invalid_argument("layout '{}': {} and {} have no size; give one, such as {}:2", to_string(layout), open->name,
                       axis.name, axis.name);
    open = &axis;
    axis.size = 1;
  }
  if (num_ranks == 0) return sized;
  if (open != nullptr && num_ranks % product == 0) open->size = static_cast<int>(num_ranks / product);
  if (open == nullptr ? product != num_ranks : num_ranks % product != 0)
    invalid_argument("'{}' has {} ranks{}, the run has {}", to_string(layout), product,
                     open == nullptr ? "" : " or a multiple", num_ranks);
  return sized;
}

SequenceLayout sequence_layout(const Layout& layout, int num_ranks) {
  const Layout sized = sized_layout(layout, num_ranks);
  SequenceLayout result{.scheme = sized.innermost().name};
  const bool all_heads = keeps_all_heads(result.scheme);
  (all_heads ? result.outer_groups : result.inner_ranks) = sized.innermost().size;
  for (std::size_t i = 1; i < sized.axes.size(); ++i) {
    const LayoutAxis& axis = sized.axes[i];
    const bool last = i + 1 == sized.axes.size();
    if (axis.name == kDataAxis && last) {
      result.data_replicas = axis.size;
    } else if (i == 1 && passes_round(axis.name) && !all_heads) {
      result.outer = axis.name;
      result.outer_groups = axis.size;
    } else {
      invalid_argument("layout '{}': {} can't be axis {} after {}; {}, and dp last", to_string(layout), axis.name,
                       i + 1, result.scheme,
                       all_heads ? "a scheme that keeps all heads takes no ring beside it"
                                 : "the second may be ring or latent-ring");
    }
  }
  return result;
}

int sequence_ranks_of(const Layout& layout) { return sequence_layout(layout).sequence_ranks(); }
int data_ranks_of(const Layout& layout) { return sequence_layout(layout).data_replicas; }

TokenShards token_shards_of(const Layout& layout, std::int64_t seq, std::int64_t batch) {
  const SequenceLayout l = sequence_layout(layout);
  return {.seq = seq, .batch = batch, .ranks_per_group = l.inner_ranks, .num_groups = l.outer_groups};
}

}  // namespace isomer
