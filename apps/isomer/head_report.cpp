#include "apps/isomer/head_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/isomer/table.h"

namespace isomer {

using nlohmann::json;

std::string tpla_line(const TplaOptions& options, const ModelConfig& config) {
  return fmt::format(
      "transform {}, {} shards, {} shared columns, RMS {}, κ {}: {} cache elements a token, layer and rank (whole: {})",
      name_of(options.transform), options.num_shards, options.shared_columns, name_of(options.rms),
      name_of(options.kappa), options.cache_width(config), config.latent_width());
}

std::string head_table(const std::vector<LayerHeads>& layers, const TplaOptions& options, bool every_head) {
  Table table(
      {"layer", every_head ? "head" : "heads", "shard", "share", "cosine", "KL of softmax", "κ", "κ least squares"});
  const auto g = static_cast<std::size_t>(options.num_shards);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerHeads& layer = layers[l];
    const std::size_t heads = layer.cosine.size() / g;
    for (std::size_t head = 0; head < (every_head ? heads : 1); ++head) {
      for (std::size_t shard = 0; shard < g; ++shard) {
        const auto value = [&](const std::vector<double>& values) {
          return every_head ? values[head * g + shard]
                            : mean_over_heads(values, options.num_shards, static_cast<int>(shard));
        };
        table.add({fmt::format("{}", l), every_head ? fmt::format("{}", head) : fmt::format("all {}", heads),
                   fmt::format("{}", shard), fmt::format("{:.4f}", layer.shares[1 + shard]),
                   fmt::format("{:.4f}", value(layer.cosine)), fmt::format("{:.5f}", value(layer.divergence)),
                   fmt::format("{:.3f}", value(layer.kappa)), fmt::format("{:.3f}", value(layer.lsq_kappa))});
      }
    }
  }
  return table.text();
}

json heads_json(const std::vector<LayerHeads>& layers, const TplaOptions& options) {
  const auto g = static_cast<std::size_t>(options.num_shards);
  const auto by_head = [&](const std::vector<double>& values) {
    json heads = json::array();
    for (std::size_t i = 0; i < values.size(); i += g) {
      heads.push_back(std::vector<double>(values.begin() + static_cast<std::ptrdiff_t>(i),
                                          values.begin() + static_cast<std::ptrdiff_t>(i + g)));
    }
    return heads;
  };
  json result = json::array();
  for (const LayerHeads& layer : layers) {
    result.push_back({{"shared_share", layer.shares.front()},
                      {"shares", std::vector<double>(layer.shares.begin() + 1, layer.shares.end())},
                      {"cosine", by_head(layer.cosine)},
                      {"kl", by_head(layer.divergence)},
                      {"kappa", by_head(layer.kappa)},
                      {"lsq_kappa", by_head(layer.lsq_kappa)}});
  }
  return result;
}

json tpla_json(const TplaOptions& options, const ModelConfig& config) {
  return {{"transform", name_of(options.transform)},  {"shards", options.num_shards},
          {"shared_columns", options.shared_columns}, {"rms", name_of(options.rms)},
          {"kappa", name_of(options.kappa)},          {"cache_elements", options.cache_width(config)}};
}

}  // namespace isomer
