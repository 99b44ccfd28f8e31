#include "convert/align_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/group.h"
#include "convert/layer_inputs.h"
#include "core/error.h"
#include "core/record.h"
#include "parallel/sequence/scheme.h"
#include "train/adamw.h"
#include "train/parameters.h"

namespace isomer {

namespace {

constexpr std::int64_t kMostSteps = 100'000;

/// One attention block on one rank.
class RankBlock {
 public:
  RankBlock(RankContext& ctx, const ModelConfig& config, std::int64_t seq)
      : ctx_(ctx),
        config_(config),
        layout_(parse_layout("explicit:1")),
        scheme_(make_sequence_scheme(layout_, config)),
        tokens_(token_shards_of(layout_, seq, 1)),
        groups_(make_sequence_groups(ctx, layout_)),
        rope_(make_rope_rows(ctx, config, DType::f32, 0, tokens_.positions(0), 1, seq)) {}

  SequenceScheme::Forward forward(const AttentionWeights& weights, const Sample& sample, const Tensor& x) const {
    return scheme_->forward(ctx_, block(weights, sample), copy_of(x));
  }
  SequenceScheme::Backward backward(const AttentionWeights& weights, const Sample& sample,
                                    SequenceScheme::Forward forward, Tensor dy) const {
    return scheme_->backward(ctx_, block(weights, sample), std::move(forward.saved), std::move(dy));
  }

 private:
  SequenceBlock block(const AttentionWeights& weights, const Sample& sample) const {
    std::vector<std::int64_t> begins;
    for (std::size_t s = 0; s < sample.segments.size(); ++s) {
      if (s == 0 || sample.segments[s] != sample.segments[s - 1]) begins.push_back(static_cast<std::int64_t>(s));
    }
    return {.layer = {config_, weights, rope_}, .tokens = tokens_, .groups = groups_, .document_starts = {begins}};
  }
  /// The schemes free their input where they may.
  Tensor copy_of(const Tensor& x) const {
    Tensor copy = ctx_.empty("x", MemoryClass::saved, DType::f32, x.shape());
    std::memcpy(copy.raw(), x.raw(), static_cast<std::size_t>(x.nbytes()));
    return copy;
  }

  RankContext& ctx_;
  const ModelConfig& config_;
  Layout layout_;
  std::unique_ptr<SequenceScheme> scheme_;
  TokenShards tokens_;
  SequenceGroups groups_;
  RopeRows rope_;
};

/// The block as the only layer of a model whose other tensors are next to nothing, for the optimiser's buffers.
ModelConfig one_layer_config(const ModelConfig& config) {
  ModelConfig one = config;
  one.num_hidden_layers = 1;
  one.vocab_size = one.intermediate_size = 1;
  one.tie_word_embeddings = true;
  one.moe = {};
  return one;
}

Tensor detached(const Tensor& tensor) {
  Tensor copy = Tensor::unrecorded("aligned", tensor.dtype(), tensor.shape());
  std::memcpy(copy.raw(), tensor.raw(), static_cast<std::size_t>(tensor.nbytes()));
  return copy;
}

/// Alignment of one layer; inputs and targets by window.
class BlockAlignment {
 public:
  BlockAlignment(RankContext& ctx, const RankBlock& block, const ModelConfig& config, const AttentionWeights& weights,
                 std::span<const Sample> samples)
      : ctx_(ctx), block_(block), parameters_(ctx, one_layer_config(config), DType::f32), samples_(samples) {
    ModelWeights start = initial_model_weights(one_layer_config(config), 1, DType::f32);
    start.layers[0].attention = weights;
    parameters_.set(start);
  }

  std::vector<Tensor> inputs, targets;  // [T, D] each

  const AttentionWeights& weights() const { return parameters_.weights.layers[0].attention; }

  /// The relative squared error over all windows.
  double error() const {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      clear();
      const Tensor y = block_.forward(weights(), samples_[i], inputs[i]).y;
      add_errors(y, i, difference, size);
    }
    return difference / size;
  }

  void step(std::int64_t number, std::int64_t total, double learning_rate_of_all) {
    clear();
    const std::size_t i = static_cast<std::size_t>(number) % inputs.size();
    SequenceScheme::Forward forward = block_.forward(weights(), samples_[i], inputs[i]);
    double difference = 0, size = 0;
    add_errors(forward.y, i, difference, size);
    Tensor dy = ctx_.empty("dy", MemoryClass::workspace, DType::f32, forward.y.shape());
    const auto scale = static_cast<float>(2 / size);
    for (std::int64_t k = 0; k < dy.numel(); ++k) {
      dy.data<float>()[k] = scale * (forward.y.data<float>()[k] - targets[i].data<float>()[k]);
    }
    const auto backward = block_.backward(weights(), samples_[i], std::move(forward), std::move(dy));
    std::memset(parameters_.gradient.raw(), 0, static_cast<std::size_t>(parameters_.gradient.nbytes()));
    backward.gradients.tensors.for_each([&](std::string_view name, const Tensor& gradient) {
      if (name == "input_layernorm.weight") return;  // the original's, and stays so
      const Parameter& parameter = parameters_.find(fmt::format("model.layers.0.{}", name));
      const Tensor to = parameters_.view(parameters_.gradient, parameter);
      ISOMER_CHECK(to.shape() == gradient.shape() && gradient.is_contiguous(), "{}", name);
      std::memcpy(to.raw(), gradient.raw(), static_cast<std::size_t>(gradient.nbytes()));
    });
    const AdamWOptions options{.learning_rate = learning_rate_of_all,
                               .min_learning_rate = learning_rate_of_all / 20,
                               .warmup_steps = std::min<std::int64_t>(10, total / 10),
                               .weight_decay = 0};
    adamw_step(ctx_, parameters_, options, number, learning_rate(options, number, total),
               gradient_norm(ctx_, parameters_));
  }

  void clear() const {
    ctx_.ledger().clear();
    ctx_.ops().clear();
    ctx_.heartbeat().fetch_add(1, std::memory_order_relaxed);
  }

 private:
  void add_errors(const Tensor& y, std::size_t i, double& difference, double& size) const {
    const float* target = targets[i].data<float>();
    const float* x = inputs[i].data<float>();
    for (std::int64_t k = 0; k < y.numel(); ++k) {
      const double error = static_cast<double>(y.data<float>()[k]) - static_cast<double>(target[k]);
      const double wanted = static_cast<double>(target[k]) - static_cast<double>(x[k]);
      difference += error * error;
      size += wanted * wanted;
    }
  }

  RankContext& ctx_;
  const RankBlock& block_;
  Parameters parameters_;
  std::span<const Sample> samples_;
};

/// inputs[layer][sample].
std::vector<std::vector<Tensor>> inputs_of(const ModelRef& original, std::span<const Sample> samples, int num_threads) {
  std::vector<std::vector<Tensor>> inputs(original.weights.layers.size());
  observe_layer_inputs(original.config, original.weights, samples, num_threads,
                       [&](std::int64_t, std::int64_t layer, const Tensor& x) {
                         inputs[static_cast<std::size_t>(layer)].push_back(detached(x));
                       });
  return inputs;
}

}  // namespace

void check_block_align_options(const BlockAlignOptions& options) {
  if (!(options.minutes >= 0) || !std::isfinite(options.minutes)) {
    invalid_argument("--align-minutes {}: expected 0 or more", options.minutes);
  }
  if (options.steps < 0 || options.steps > kMostSteps) {
    invalid_argument("--align-steps {}: expected 0 to {}", options.steps, kMostSteps);
  }
  if (options.steps > 0 && options.minutes > 0) invalid_argument("--align-steps and --align-minutes: give one of them");
  if (options.tokens < 1) invalid_argument("--align-tokens {}: at least 1", options.tokens);
  if (!(options.learning_rate > 0 && options.learning_rate <= 1)) {
    invalid_argument("--align-rate {}: expected more than 0, at most 1", options.learning_rate);
  }
}

std::vector<AlignedBlock> align_blocks(const ModelRef& original, const ModelConfig& config, ModelWeights& converted,
                                       std::span<const Sample> samples, const BlockAlignOptions& options,
                                       int num_threads, const ConversionProgress& progress) {
  const auto seq = static_cast<std::int64_t>(samples.front().ids.size());
  samples = samples.first(
      std::min<std::size_t>(samples.size(), static_cast<std::size_t>(std::max<std::int64_t>(1, options.tokens / seq))));
  std::vector<std::vector<Tensor>> inputs = inputs_of(original, samples, num_threads);
  const std::int64_t num_layers = config.num_hidden_layers;
  std::vector<AlignedBlock> result;
  run_group({.num_ranks = 1, .threads_per_rank = num_threads}, [&](RankContext& ctx) {
    const RankBlock teacher(ctx, original.config, seq), student(ctx, config, seq);
    std::int64_t steps = options.steps;
    for (std::size_t l = 0; l < inputs.size(); ++l) {
      if (progress) progress("aligning: layer", static_cast<std::int64_t>(l), num_layers);
      BlockAlignment layer(ctx, student, config, converted.layers[l].attention, samples);
      layer.inputs = std::move(inputs[l]);
      for (std::size_t i = 0; i < samples.size(); ++i) {
        layer.clear();
        layer.targets.push_back(
            detached(teacher.forward(original.weights.layers[l].attention, samples[i], layer.inputs[i]).y));
      }
      AlignedBlock report{.error_before = layer.error()};
      if (steps == 0) {
        // What the budget buys, by the time of the first layer's first steps, which are thrown away.
        BlockAlignment trial(ctx, student, config, converted.layers[l].attention, samples);
        trial.inputs = layer.inputs;
        trial.targets = layer.targets;
        constexpr int kTrialSteps = 4;
        const double begin = wall_clock_s();
        for (int i = 0; i < kTrialSteps; ++i) trial.step(i, kTrialSteps, options.learning_rate);
        const double each = (wall_clock_s() - begin) / kTrialSteps;
        steps = std::clamp<std::int64_t>(
            static_cast<std::int64_t>(options.minutes * 60 / static_cast<double>(num_layers) / each), 1, kMostSteps);
      }
      for (std::int64_t i = 0; i < steps; ++i) layer.step(i, steps, options.learning_rate);
      report.error_after = layer.error();
      report.steps = steps;
      if (report.error_after < report.error_before) {  // else the conversion's own weights stay
        AttentionWeights aligned = layer.weights();
        aligned.for_each([](std::string_view, Tensor& tensor) { tensor = detached(tensor); });
        aligned.input_layernorm = converted.layers[l].attention.input_layernorm;
        converted.layers[l].attention = aligned;
      }
      result.push_back(report);
    }
  });
  return result;
}

}  // namespace isomer
