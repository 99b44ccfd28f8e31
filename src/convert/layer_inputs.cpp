#include "convert/layer_inputs.h"

#include <cmath>

#include "comm/group.h"
#include "convert/observed_forward.h"
#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "train/language_model.h"

namespace isomer {

namespace {

using Values = std::vector<double>;

/// x̂ = γ ∘ x/RMS(x), row by row, in place.
void normalise(const ModelConfig& config, const Values& gamma, Values& x) {
  for (std::size_t row = 0; row < x.size(); row += gamma.size()) {
    double sum = 0;
    for (std::size_t i = 0; i < gamma.size(); ++i) sum += x[row + i] * x[row + i];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(gamma.size()) + config.rms_norm_eps);
    for (std::size_t i = 0; i < gamma.size(); ++i) x[row + i] *= scale * gamma[i];
  }
}

}  // namespace

void observe_layer_inputs(const ModelConfig& config, const ModelWeights& weights, std::span<const Sample> samples,
                          int num_threads, const std::function<void(std::int64_t, std::int64_t, const Tensor&)>& sink) {
  if (samples.empty()) return;
  run_group({.num_ranks = 1, .threads_per_rank = num_threads}, [&](RankContext& ctx) {
    LanguageModel model(ctx, {.config = config,
                              .layout = parse_layout("explicit:1"),
                              .dtype = DType::f32,
                              .seq = static_cast<std::int64_t>(samples.front().ids.size())});
    std::int64_t sample = 0, layer = 0;
    ctx.set_observer([&](std::string_view name, const Tensor& tensor) {
      if (name == "layer input") sink(sample, layer++, tensor);
    });
    for (std::size_t i = 0; i < samples.size(); ++i) {
      ctx.ledger().clear();
      ctx.ops().clear();
      sample = static_cast<std::int64_t>(i);
      layer = 0;
      model.token_losses(ctx, weights, samples.subspan(i, 1));
    }
  });
}

std::vector<InputMoment> collect_input_moments(const ModelConfig& config, const ModelWeights& weights,
                                               std::span<const Sample> samples, int num_threads,
                                               const ConversionProgress& progress) {
  const std::int64_t hidden = config.hidden_size;
  std::vector<InputMoment> moments(static_cast<std::size_t>(config.num_hidden_layers));
  for (InputMoment& moment : moments) moment.second.assign(static_cast<std::size_t>(hidden * hidden), 0);
  observe_layer_inputs(config, weights, samples, num_threads,
                       [&](std::int64_t sample, std::int64_t layer, const Tensor& x) {
                         if (progress && layer == 0) progress("calibrating: window", sample, std::ssize(samples));
                         const auto l = static_cast<std::size_t>(layer);
                         Values rows = widened(x);
                         for (const double value : rows) {
                           if (!std::isfinite(value))
                             throw Error(fmt::format("layer {}: an input on the calibration text is {}", layer, value));
                         }
                         normalise(config, widened(weights.layers[l].attention.input_layernorm), rows);
                         reference::gemm_tiled({.m = hidden,
                                                .n = hidden,
                                                .k = x.size(0),
                                                .a = rows.data(),
                                                .a_stride = hidden,
                                                .a_transposed = true,
                                                .b = rows.data(),
                                                .b_stride = hidden,
                                                .c = moments[l].second.data(),
                                                .c_stride = hidden,
                                                .beta = 1},
                                               num_threads);
                         moments[l].num_tokens += x.size(0);
                       });
  return moments;
}

}  // namespace isomer
