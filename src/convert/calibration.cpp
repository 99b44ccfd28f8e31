#include "convert/calibration.h"

#include <algorithm>
#include <cmath>

#include "convert/observed_forward.h"
#include "core/error.h"
#include "kernels/reference/blocked_ops.h"

namespace isomer {

namespace {

using Values = std::vector<double>;

constexpr std::int64_t kDefaultWindow = 512;

std::int64_t window_of(const ModelConfig& config, const CalibrationOptions& options) {
  const std::int64_t longest = config.max_position_embeddings;
  if (options.window < 0) invalid_argument("--window {}: at least 1 token", options.window);
  if (longest > 0 && options.window > longest) {
    invalid_argument("--window {}: {} has max_position_embeddings {}; read shorter windows", options.window,
                     config.name, longest);
  }
  if (options.window > 0) return options.window;
  return longest > 0 ? std::min(kDefaultWindow, longest) : kDefaultWindow;
}

/// f = c/RMS(c), in place; c itself without a norm.
void normalise(const ModelConfig& config, Values& c) {
  const auto d = static_cast<std::size_t>(config.kv_lora_rank);
  for (std::size_t row = 0; row < c.size() && config.kv_a_layernorm; row += d) {
    double sum = 0;
    for (std::size_t j = 0; j < d; ++j) sum += c[row + j] * c[row + j];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(d) + ModelConfig::kInnerNormEps);
    for (std::size_t j = 0; j < d; ++j) c[row + j] *= scale;
  }
}

LayerMoments empty_moments(const ModelConfig& config) {
  const std::int64_t d = config.kv_lora_rank, n = config.qk_nope_head_dim;
  return {.second = Values(static_cast<std::size_t>(d * d), 0),
          .first = Values(static_cast<std::size_t>(d), 0),
          .query_second = Values(static_cast<std::size_t>(config.num_attention_heads * n * n), 0)};
}

void add_queries(const ModelConfig& config, const Values& q, std::int64_t tokens, int num_threads, Values& sums) {
  const std::int64_t n = config.qk_nope_head_dim, h = config.num_attention_heads;
  if (n == 0) return;
  reference::parallel_tasks(h, num_threads, [&](std::int64_t head) {
    const double* rows = q.data() + head * config.qk_head_dim();
    const std::int64_t stride = h * config.qk_head_dim();
    reference::gemm({.m = n,
                     .n = n,
                     .k = tokens,
                     .a = rows,
                     .a_stride = stride,
                     .a_transposed = true,
                     .b = rows,
                     .b_stride = stride,
                     .c = sums.data() + head * n * n,
                     .c_stride = n,
                     .beta = 1});
  });
}

void add_layer(const ModelConfig& config, ObservedLayer&& seen, int num_threads, LayerMoments& sums) {
  const std::int64_t d = config.kv_lora_rank, tokens = static_cast<std::int64_t>(seen.c.size()) / d;
  for (const double value : seen.c) {
    if (!std::isfinite(value)) {
      throw Error(fmt::format("layer {}: a latent of the calibration text is {}: the weights overflow in float32",
                              seen.layer, value));
    }
  }
  normalise(config, seen.c);
  reference::gemm_tiled({.m = d,
                         .n = d,
                         .k = tokens,
                         .a = seen.c.data(),
                         .a_stride = d,
                         .a_transposed = true,
                         .b = seen.c.data(),
                         .b_stride = d,
                         .c = sums.second.data(),
                         .c_stride = d,
                         .beta = 1},
                        num_threads);
  for (std::size_t i = 0; i < seen.c.size(); ++i) sums.first[i % static_cast<std::size_t>(d)] += seen.c[i];
  add_queries(config, seen.q, tokens, num_threads, sums.query_second);
  sums.num_tokens += tokens;
}

}  // namespace

void rotate_latents(const ModelConfig& config, const std::vector<double>& u, int num_threads, std::vector<double>& c) {
  const std::int64_t d = config.kv_lora_rank;
  Values rotated(c.size());
  reference::gemm_tiled({.m = static_cast<std::int64_t>(c.size()) / d,
                         .n = d,
                         .k = d,
                         .a = c.data(),
                         .a_stride = d,
                         .b = u.data(),
                         .b_stride = d,
                         .c = rotated.data(),
                         .c_stride = d},
                        num_threads);
  c = std::move(rotated);
}

CalibrationWindows calibration_windows(const TokenDataset& text, const ModelConfig& config,
                                       const CalibrationOptions& options) {
  if (text.vocab_size() > config.vocab_size) {
    invalid_argument("the text's tokenizer has {} tokens, {} has a vocabulary of {}: they don't belong together",
                     text.vocab_size(), config.name, config.vocab_size);
  }
  CalibrationWindows result{.window = window_of(config, options)};
  const std::int64_t available = (text.num_tokens() - 1) / result.window;
  if (available < 2) {
    invalid_argument(
        "--calibrate: {} tokens of text make {} windows of {}: one to calibrate on and one to hold out are needed; "
        "give more text, or a shorter --window",
        text.num_tokens(), std::max<std::int64_t>(available, 0), result.window);
  }
  if (options.tokens < 1) invalid_argument("--calibration-tokens {}: at least 1", options.tokens);
  const BatchOrder order(text, {.seq_len = result.window, .seed = options.seed, .shuffle = true});
  const std::int64_t all = order.num_sequences();
  const std::int64_t held_out =
      std::clamp<std::int64_t>(all / 10, 1, std::max<std::int64_t>(1, options.held_out_windows));
  const std::int64_t wanted = std::max<std::int64_t>(1, options.tokens / result.window);
  const std::int64_t taken = std::min(wanted, all - held_out);
  // The held-out ones first: another amount of calibration text leaves them as they are.
  for (std::int64_t i = 0; i < held_out; ++i) result.held_out.push_back(order.sample(i));
  for (std::int64_t i = held_out; i < held_out + taken; ++i) result.calibration.push_back(order.sample(i));
  return result;
}

std::vector<LayerMoments> collect_moments(const ModelConfig& config, const ModelWeights& weights,
                                          std::span<const Sample> samples, int num_threads,
                                          const ConversionProgress& progress) {
  std::vector<LayerMoments> layers(static_cast<std::size_t>(config.num_hidden_layers), empty_moments(config));
  observe_forward(config, weights, samples, num_threads, [&](ObservedLayer&& seen) {
    if (progress && seen.layer == 0) {
      progress("calibrating: window", seen.sample, static_cast<std::int64_t>(samples.size()));
    }
    LayerMoments& sums = layers.at(static_cast<std::size_t>(seen.layer));
    add_layer(config, std::move(seen), num_threads, sums);
  });
  return layers;
}

std::vector<HeadSums> measure_shards(const ModelConfig& config, const ModelWeights& weights, const TplaOptions& options,
                                     std::span<const ShardedLayer> layers, std::span<const Sample> samples,
                                     int num_threads, const ConversionProgress& progress) {
  check_tpla_options(options, config);
  ISOMER_CHECK(static_cast<std::int64_t>(layers.size()) == config.num_hidden_layers, "{} layers", layers.size());
  std::vector<HeadMeter> meters;
  for (const ShardedLayer& layer : layers) {
    meters.emplace_back(config, options, layer.scalars, layer.kv_b, layer.gamma);
  }
  observe_forward(config, weights, samples, num_threads, [&](ObservedLayer&& seen) {
    const auto at = static_cast<std::size_t>(seen.layer);
    if (progress && seen.layer == 0) {
      progress("measuring heads: window", seen.sample, static_cast<std::int64_t>(samples.size()));
    }
    if (!layers[at].rotation.empty()) rotate_latents(config, layers[at].rotation, num_threads, seen.c);
    meters[at].add({.q = std::move(seen.q),
                    .c = std::move(seen.c),
                    .k_pe = std::move(seen.k_pe),
                    .segments = samples[static_cast<std::size_t>(seen.sample)].segments},
                   num_threads);
  });
  std::vector<HeadSums> sums;
  for (const HeadMeter& meter : meters) sums.push_back(meter.sums());
  return sums;
}

}  // namespace isomer
