#include "eval/heads.h"

#include <numeric>

#include "convert/observed_forward.h"
#include "core/error.h"

namespace isomer {

namespace {

std::vector<double> shares_of(const TplaOptions& options, const std::vector<double>& moments) {
  const auto sum = [&](TplaRange range) {
    return std::accumulate(moments.begin() + range.begin, moments.begin() + range.end(), 0.0);
  };
  const auto d = std::ssize(moments);
  const double all = sum({0, d});
  std::vector<double> shares = {sum(options.shared())};
  for (int i = 0; i < options.num_shards; ++i) shares.push_back(sum(options.shard(i, d)));
  for (double& share : shares) share = all > 0 ? share / all : 0;
  return shares;
}

}  // namespace

std::vector<LayerHeads> measure_heads(const ModelConfig& config, const ModelWeights& weights,
                                      const TplaOptions& options, std::span<const TplaLayer> scalars,
                                      std::span<const Sample> samples, int num_threads,
                                      const ConversionProgress& progress) {
  std::vector<ShardedLayer> layers;
  for (std::size_t l = 0; l < scalars.size(); ++l) {
    const AttentionWeights& attention = weights.layers.at(l).attention;
    layers.push_back({.scalars = scalars[l], .kv_b = widened(attention.kv_b_proj)});
    if (attention.kv_a_layernorm) layers.back().gamma = widened(attention.kv_a_layernorm);
  }
  const std::vector<HeadSums> sums = measure_shards(config, weights, options, layers, samples, num_threads, progress);
  std::vector<LayerHeads> result;
  for (std::size_t l = 0; l < sums.size(); ++l) {
    result.push_back({.cosine = sums[l].cosine(),
                      .divergence = sums[l].mean_divergence(),
                      .kappa = scalars[l].kappa,
                      .lsq_kappa = sums[l].least_squares_kappa(),
                      .shares = shares_of(options, scalars[l].moments)});
  }
  return result;
}

double mean_over_heads(const std::vector<double>& values, int num_shards, int shard) {
  double sum = 0;
  std::int64_t count = 0;
  for (auto i = static_cast<std::size_t>(shard); i < values.size(); i += static_cast<std::size_t>(num_shards)) {
    sum += values[i];
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace isomer
