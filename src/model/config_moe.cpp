// Experts and router of config.json (model-math: Router).
#include <algorithm>

#include "model/config.h"
#include "model/config_reader.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxExperts = 1 << 16;

RouterKind read_router(const ConfigReader& reader, bool sigmoid_by_default) {
  const std::string method = reader.text_or("topk_method", sigmoid_by_default ? "noaux_tc" : "greedy");
  const bool noaux = method == "noaux_tc";
  if (!noaux && method != "greedy" && method != "group_limited_greedy") {
    reader.wrong("topk_method", "greedy, group_limited_greedy or noaux_tc");
  }
  const std::string scoring = reader.text_or("scoring_func", noaux ? "sigmoid" : "softmax");
  if (scoring != (noaux ? "sigmoid" : "softmax")) {
    reader.wrong("scoring_func", fmt::format("{} with topk_method {}", noaux ? "sigmoid" : "softmax", method));
  }
  return noaux ? RouterKind::sigmoid_noaux_tc
               : (method == "greedy" ? RouterKind::softmax_greedy : RouterKind::softmax_group_limited);
}

void check_groups(const ConfigReader& reader, const MoeConfig& moe) {
  if (moe.n_routed_experts % moe.n_group != 0) {
    reader.wrong("n_group", fmt::format("a divisor of n_routed_experts, {}", moe.n_routed_experts));
  }
  const auto group_size = moe.n_routed_experts / moe.n_group;
  if (moe.topk_group > moe.n_group) reader.wrong("topk_group", fmt::format("at most n_group, {}", moe.n_group));
  if (moe.router == RouterKind::sigmoid_noaux_tc && moe.n_group > 1 && group_size < 2) {
    reader.wrong("n_group", "groups of two experts or more: noaux_tc adds the two best of a group");
  }
  const auto choosable = moe.router == RouterKind::softmax_greedy ? moe.n_routed_experts : moe.topk_group * group_size;
  if (moe.num_experts_per_tok > choosable) {
    reader.wrong("num_experts_per_tok", fmt::format("at most the {} experts that a token may choose from", choosable));
  }
}

/// Newer files list every layer's kind; the list must say what first_k_dense_replace can: dense ones, then sparse.
std::int64_t first_sparse_layer(const ConfigReader& reader, std::int64_t num_layers) {
  constexpr auto kListKey = "mlp_layer_types";
  if (!reader.has(kListKey)) return reader.integer_or("first_k_dense_replace", 0, num_layers, 0);
  const auto& kinds = reader.value(kListKey);
  if (!kinds.is_array() || kinds.size() != static_cast<std::size_t>(num_layers)) {
    reader.wrong(kListKey, fmt::format("an array of {} strings, one a layer", num_layers));
  }
  const auto first = std::find_if(kinds.begin(), kinds.end(), [](const auto& kind) { return kind != "dense"; });
  if (!std::all_of(first, kinds.end(), [](const auto& kind) { return kind == "sparse"; })) {
    reader.wrong(kListKey, "\"dense\" layers followed by \"sparse\" ones");
  }
  return first - kinds.begin();
}

}  // namespace

void read_moe(const ConfigReader& reader, ModelConfig& config, bool sigmoid_by_default) {
  MoeConfig& moe = config.moe;
  moe.n_routed_experts = reader.integer_or("n_routed_experts", 0, kMaxExperts, 0);
  if (moe.n_routed_experts == 0) return;
  moe.num_experts_per_tok = reader.integer("num_experts_per_tok", 1, moe.n_routed_experts);
  moe.n_shared_experts = reader.integer_or("n_shared_experts", 0, 1024, 0);
  moe.moe_intermediate_size = reader.integer("moe_intermediate_size", 1, 1 << 24);
  moe.first_k_dense_replace = first_sparse_layer(reader, config.num_hidden_layers);
  if (reader.integer_or("moe_layer_freq", 1, 1 << 20, 1) != 1) reader.wrong("moe_layer_freq", "1");
  moe.n_group = reader.integer_or("n_group", 1, moe.n_routed_experts, 1);
  moe.topk_group = reader.integer_or("topk_group", 1, moe.n_routed_experts, moe.n_group);
  moe.norm_topk_prob = reader.boolean("norm_topk_prob");
  moe.routed_scaling_factor = reader.number("routed_scaling_factor", 1e-6, 1e6);
  moe.router = read_router(reader, sigmoid_by_default);
  check_groups(reader, moe);
}

}  // namespace isomer
