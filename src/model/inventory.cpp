#include "model/inventory.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "model/weights.h"

namespace isomer {

namespace {

using TensorFunction = std::function<void(const std::string&, const Shape&, bool)>;

void attention_tensors(const ModelConfig& config, const std::string& layer, const TensorFunction& fn) {
  AttentionWeights slots;
  slots.for_each_slot([&](std::string_view slot, Tensor&) {
    const Shape shape = attention_tensor_shape(config, slot);
    if (!shape.empty()) fn(fmt::format("{}.{}", layer, slot), shape, slot.ends_with(".bias"));
  });
}

void mlp_tensors(const std::string& prefix, std::int64_t hidden, std::int64_t intermediate, const TensorFunction& fn) {
  fn(prefix + ".gate_proj.weight", {intermediate, hidden}, false);
  fn(prefix + ".up_proj.weight", {intermediate, hidden}, false);
  fn(prefix + ".down_proj.weight", {hidden, intermediate}, false);
}

void moe_tensors(const ModelConfig& config, const std::string& prefix, const TensorFunction& fn) {
  const MoeConfig& moe = config.moe;
  const auto hidden = config.hidden_size;
  fn(prefix + ".gate.weight", {moe.n_routed_experts, hidden}, false);
  if (moe.router == RouterKind::sigmoid_noaux_tc) {
    fn(prefix + ".gate.e_score_correction_bias", {moe.n_routed_experts}, false);
  }
  for (std::int64_t e = 0; e < moe.n_routed_experts; ++e)
    mlp_tensors(fmt::format("{}.experts.{}", prefix, e), hidden, moe.moe_intermediate_size, fn);
  if (moe.n_shared_experts > 0) {
    mlp_tensors(prefix + ".shared_experts", hidden, moe.n_shared_experts * moe.moe_intermediate_size, fn);
  }
}

/// Layer of "model.layers.L.…".
std::optional<std::int64_t> layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::int64_t layer = 0;
  const auto [end, code] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (code != std::errc() || end == name.data() + name.size() || *end != '.') return std::nullopt;
  return layer;
}

/// Complaints of one kind about many tensors, as one line.
class Lines {
 public:
  void add(std::string_view what, std::string_view name, std::string_view remedy = "") {
    auto& line = lines_[{std::string(what), pattern_of(name), std::string(remedy)}];
    if (line.count++ == 0) line.first = name;
  }
  std::vector<std::string> text() const {
    std::vector<std::string> result;
    for (const auto& [key, line] : lines_) {
      const auto& [what, pattern, remedy] = key;
      const std::string which =
          line.count == 1 ? line.first : fmt::format("{} ({} tensors, first {})", pattern, line.count, line.first);
      result.push_back(fmt::format("{}: {}{}", what, which, remedy));
    }
    return result;
  }

 private:
  struct Line {
    std::int64_t count = 0;
    std::string first;
  };
  std::map<std::tuple<std::string, std::string, std::string>, Line> lines_;
};

/// Why a tensor that the configuration doesn't ask for is no fault; nothing if it is one.
std::optional<std::string> excuse(const ModelConfig& config, const Checkpoint& checkpoint, std::string_view name) {
  constexpr std::string_view kScale = "_scale_inv";
  if (const auto layer = layer_of(name); layer && *layer >= config.num_hidden_layers) {
    return fmt::format("skipped, of the multi-token-prediction layer {}", *layer);
  }
  if (name.ends_with(kScale)) {
    const auto scaled = name.substr(0, name.size() - kScale.size());
    if (checkpoint.contains(scaled) && checkpoint.info(scaled).dtype == FileDType::f8_e4m3) return "FP8 scales";
  }
  if (name.ends_with("rotary_emb.inv_freq")) return "skipped, RoPE is computed";
  if (name.find(".self_attn.indexer.") != std::string_view::npos) return "skipped, attention here is dense";
  if (name == "lm_head.weight" && config.tie_word_embeddings) return "skipped, embeddings are tied";
  return std::nullopt;
}

/// FP8 needs its scales; nothing when all is well.
std::optional<std::string> fault_of_dtype(const Checkpoint& checkpoint, const TensorInfo& info) {
  if (!is_convertible(info.dtype)) return fmt::format("{}, which can't be converted", name_of(info.dtype));
  if (info.dtype != FileDType::f8_e4m3) return std::nullopt;
  try {
    checkpoint.read(info.name, DType::f32, {.rows = {.begin = 0, .length = 0}});
  } catch (const Error&) {
    return "FP8 without fitting float32 scales (weight_scale_inv)";
  }
  return std::nullopt;
}

}  // namespace

void for_each_expected_tensor(const ModelConfig& config, const TensorFunction& fn) {
  fn("model.embed_tokens.weight", {config.vocab_size, config.hidden_size}, false);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const auto layer = fmt::format("model.layers.{}", l);
    attention_tensors(config, layer, fn);
    fn(layer + ".post_attention_layernorm.weight", {config.hidden_size}, false);
    if (config.is_moe_layer(l)) {
      moe_tensors(config, layer + ".mlp", fn);
    } else {
      mlp_tensors(layer + ".mlp", config.hidden_size, config.intermediate_size, fn);
    }
  }
  fn("model.norm.weight", {config.hidden_size}, false);
  if (!config.tie_word_embeddings) fn("lm_head.weight", {config.vocab_size, config.hidden_size}, false);
}

std::string pattern_of(std::string_view name) {
  std::string pattern;
  while (!name.empty()) {
    const auto dot = std::min(name.find('.'), name.size());
    const auto part = name.substr(0, dot);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    pattern += number ? "*" : part;
    if (dot < name.size()) pattern += '.';
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return pattern;
}

std::vector<TensorGroup> group_tensors(const Checkpoint& checkpoint) {
  std::map<std::tuple<std::string, std::string, Shape>, TensorGroup> groups;
  for (const auto name : checkpoint.names()) {
    const TensorInfo& info = checkpoint.info(name);
    auto& group = groups[{pattern_of(name), std::string(info.type_name()), info.shape}];
    group.pattern = pattern_of(name);
    group.dtype = info.type_name();
    group.shape = info.shape;
    ++group.count;
    group.bytes += info.bytes;
  }
  std::vector<TensorGroup> result;
  for (auto& [key, group] : groups) result.push_back(std::move(group));
  return result;
}

Inventory take_inventory(const Checkpoint& checkpoint, const ModelConfig& config) {
  Inventory inventory;
  Lines problems, notes;
  std::set<std::string, std::less<>> expected;
  for_each_expected_tensor(config, [&](const std::string& name, const Shape& shape, bool optional) {
    expected.insert(name);
    if (!checkpoint.contains(name)) {
      const bool inner_norm = name.ends_with("kv_a_layernorm.weight");
      const auto remedy = inner_norm ? "; if the model was converted without this norm, put \"kv_a_layernorm\": false "
                                       "into its config.json"
                                     : "";
      if (!optional) problems.add("missing", name, remedy);
      return;
    }
    const TensorInfo& info = checkpoint.info(name);
    if (info.shape != shape) {
      problems.add(fmt::format("shape {} where the configuration makes it {}", to_string(info.shape), to_string(shape)),
                   name);
    } else if (const auto fault = fault_of_dtype(checkpoint, info)) {
      problems.add(*fault, name);
    }
    inventory.num_parameters += num_elements(info.shape);
  });
  for (const auto name : checkpoint.names()) {
    if (expected.contains(name)) continue;
    if (const auto reason = excuse(config, checkpoint, name)) {
      notes.add(*reason, name);
    } else {
      problems.add("not part of this model", name);
    }
  }
  inventory.problems = problems.text();
  inventory.notes = notes.text();
  return inventory;
}

}  // namespace isomer
