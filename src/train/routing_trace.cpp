#include "train/routing_trace.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "model/json_text.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

constexpr std::int64_t kMaxTraceBytes = std::int64_t{4} << 30;

std::int64_t integer_at(const nlohmann::json& json, const char* key, const std::string& source) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_integer()) {
    throw Error(fmt::format("{}: key '{}' must be a whole number", source, key));
  }
  return found->get<std::int64_t>();
}

}  // namespace

RoutingTrace::RoutingTrace(const ModelConfig& config, std::int64_t sequences, std::int64_t seq)
    : sequences_(sequences),
      seq_(seq),
      top_k_(config.moe.num_experts_per_tok),
      num_experts_(config.moe.n_routed_experts) {
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    if (config.is_moe_layer(l)) layers_[l].assign(static_cast<std::size_t>(sequences * seq * top_k_), -1);
  }
  if (layers_.empty()) invalid_argument("a routing trace: '{}' has no mixture of experts", config.name);
}

RoutingTrace::RoutingTrace(RoutingTrace&& other) noexcept
    : sequences_(other.sequences_),
      seq_(other.seq_),
      top_k_(other.top_k_),
      num_experts_(other.num_experts_),
      layers_(std::move(other.layers_)) {}

RoutingTrace RoutingTrace::load(const std::filesystem::path& path, const ModelConfig& config, std::int64_t sequences,
                                std::int64_t seq) {
  RoutingTrace trace(config, sequences, seq);
  const std::string source = path.string();
  const nlohmann::json json = parse_json(read_text_file(path, kMaxTraceBytes), source);
  if (!json.is_object()) throw Error(fmt::format("{}: it is no routing trace: an object was expected", source));
  const auto expect = [&](const char* key, std::int64_t wanted) {
    if (const std::int64_t found = integer_at(json, key, source); found != wanted) {
      throw Error(fmt::format("{}: key '{}' is {}, this run has {}", source, key, found, wanted));
    }
  };
  expect("sequences", sequences);
  expect("seq", seq);
  expect("top_k", trace.top_k_);
  expect("num_experts", trace.num_experts_);
  const auto layers = json.find("layers");
  if (layers == json.end() || !layers->is_object()) throw Error(fmt::format("{}: key 'layers' is missing", source));
  for (auto& [layer, experts] : trace.layers_) {
    const auto found = layers->find(std::to_string(layer));
    if (found == layers->end() || !found->is_array() || found->size() != experts.size()) {
      throw Error(fmt::format("{}: layers: layer {} must be a list of {} experts", source, layer, experts.size()));
    }
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const nlohmann::json& value = (*found)[i];
      const bool fits = value.is_number_integer() && value >= 0 && value < trace.num_experts_;
      if (!fits) {
        throw Error(fmt::format("{}: layers: layer {}: entry {} is {}, experts are 0 to {}", source, layer, i,
                                brief(value), trace.num_experts_ - 1));
      }
      experts[i] = value.get<std::int32_t>();
    }
  }
  return trace;
}

void RoutingTrace::save(const std::filesystem::path& path) const {
  nlohmann::json layers = nlohmann::json::object();
  for (const auto& [layer, experts] : layers_) {
    if (std::find(experts.begin(), experts.end(), -1) != experts.end()) {
      throw Error(fmt::format("{}: layer {} has tokens without experts: the trace is not whole", path.string(), layer));
    }
    layers[std::to_string(layer)] = experts;
  }
  const nlohmann::json json = {{"schema_version", 1}, {"sequences", sequences_},     {"seq", seq_},
                               {"top_k", top_k_},     {"num_experts", num_experts_}, {"layers", layers}};
  write_text_atomically(path, json.dump() + "\n");
}

void RoutingTrace::enter(std::int64_t layer, std::span<const std::int64_t> tokens, const Routing& routing) {
  ISOMER_CHECK(routing.top_k == top_k_ && routing.num_tokens == static_cast<std::int64_t>(tokens.size()),
               "routing of {} × {} for {} tokens × {}", routing.num_tokens, routing.top_k, tokens.size(), top_k_);
  const std::lock_guard lock(mutex_);
  auto& experts = layers_.at(layer);
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    std::copy_n(routing.experts.begin() + static_cast<std::ptrdiff_t>(row) * top_k_, top_k_,
                experts.begin() + tokens[row] * top_k_);
  }
}

Routing RoutingTrace::of(std::int64_t layer, std::span<const std::int64_t> tokens) const {
  Routing routing{.num_tokens = static_cast<std::int64_t>(tokens.size()), .top_k = top_k_};
  const auto& experts = layers_.at(layer);
  for (const std::int64_t token : tokens) {
    const auto first = experts.begin() + token * top_k_;
    routing.experts.insert(routing.experts.end(), first, first + top_k_);
  }
  return routing;
}

}  // namespace isomer
