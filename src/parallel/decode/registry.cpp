#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/decode/decode_layout.h"

namespace isomer {

namespace {

struct Entry {
  std::string name;
  std::unique_ptr<DecodeLayout> (*make)();
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> list = {{"tp", make_tp}, {"kvp", make_kvp}};
  return list;
}

const Entry& entry_of(const Layout& layout) {
  const std::string& name = layout.innermost().name;
  const auto found = std::find_if(entries().begin(), entries().end(), [&](const Entry& e) { return e.name == name; });
  if (found == entries().end()) {
    invalid_argument("decode layout '{}' is unknown; there are: {}", name, fmt::join(decode_layout_names(), ", "));
  }
  if (layout.axes.size() > 1) {
    invalid_argument("layout '{}': {} takes no axis '{}'", to_string(layout), name, layout.axes[1].name);
  }
  if (!layout.innermost().options.empty()) {
    invalid_argument("layout '{}': {} has no option '{}'", to_string(layout), name,
                     layout.innermost().options.begin()->first);
  }
  return *found;
}

/// A view of the rank's part.
Tensor cut(const Tensor& tensor, const std::optional<WeightSlice>& slice) {
  return slice ? tensor.slice(slice->axis, slice->range.begin, slice->range.count) : tensor;
}

}  // namespace

const std::vector<std::string>& decode_layout_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Entry& entry : entries()) list.push_back(entry.name);
    return list;
  }();
  return names;
}

int decode_ranks_of(const Layout& layout) {
  entry_of(layout);
  return std::max(1, layout.innermost().size);
}

CacheShards decode_cache_shards(const Layout& layout) {
  return entry_of(layout).make()->cache_shards(decode_ranks_of(layout));
}

std::string why_decode_unfit(const Layout& layout, const ModelConfig& config) {
  return why_heads_unfit(config, decode_ranks_of(layout));
}

std::unique_ptr<DecodeLayout> make_decode_layout(const Layout& layout, const ModelConfig& config) {
  const std::string reason = why_decode_unfit(layout, config);
  if (!reason.empty()) invalid_argument("layout '{}': {}", to_string(layout), reason);
  return entry_of(layout).make();
}

DecodeModel cut_model(const ModelConfig& config, const ModelWeights& weights, const TensorParallel& parallel) {
  DecodeModel model{.config = config, .local = config, .weights = weights, .parallel = parallel};
  model.local.num_attention_heads = query_heads_of(config, parallel).count;
  model.weights.for_each([&](const std::string& name, Tensor& tensor) {
    tensor = cut(tensor, slice_of_weight(config, name, tensor.size(0), tensor.size(-1), parallel));
  });
  return model;
}

CacheRowShape cache_row_shape(const ModelConfig& config, const TensorParallel& parallel) {
  if (config.attention == AttentionKind::mla) return {1, config.latent_width(), config.kv_lora_rank, true};
  const std::int64_t heads = parallel.split_kv_heads ? kv_heads_of(config, parallel).count : config.num_key_value_heads;
  return {heads, config.head_dim, config.head_dim, false};
}

}  // namespace isomer
