#include "convert/align.h"

#include <algorithm>
#include <cmath>

#include "comm/group.h"
#include "convert/observed_forward.h"
#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "layers/mla.h"
#include "train/adamw.h"

namespace isomer {

namespace {

/// [T, h, w] → [h, T, w].
Tensor by_head(const Tensor& t) { return t.transpose(0, 1); }

/// A window of one layer.
struct Window {
  Tensor q;                  // [T, h, n + r]
  std::vector<Tensor> keys;  // of each shard, [T, 1, m + w + r]: shared columns, own ones, rope
  Tensor whole;              // [T, 1, d + r]
  std::vector<TokenRun> runs;
  Tensor target;    // [T, D]: W_o A*
  double norm = 0;  // Σ target²
};

/// Rows [T, 1, …] normed by all columns (rms_scale 0), or by the shared and own ones, as a shard does.
Tensor keys_of(const ModelConfig& config, const ObservedLayer& seen, TplaRange shared, TplaRange own,
               double rms_scale) {
  const std::int64_t d = config.kv_lora_rank, r = config.qk_rope_head_dim, width = shared.count + own.count + r;
  const auto tokens = static_cast<std::int64_t>(seen.c.size()) / d;
  Tensor keys = Tensor::unrecorded("keys", DType::f32, {tokens, 1, width});
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* c = seen.c.data() + t * d;
    double local = 0, whole = 0;
    for (std::int64_t j = 0; j < d; ++j) {
      whole += c[j] * c[j];
      if (j < shared.end() || (j >= own.begin && j < own.end())) local += c[j] * c[j];
    }
    const double mean = (rms_scale > 0 ? rms_scale * local : whole) / static_cast<double>(d);
    const double scale = config.kv_a_layernorm ? 1 / std::sqrt(mean + ModelConfig::kInnerNormEps) : 1;
    float* row = keys.data<float>() + t * width;
    for (std::int64_t j = 0; j < shared.count; ++j) *row++ = static_cast<float>(c[j] * scale);
    for (std::int64_t j = own.begin; j < own.end(); ++j) *row++ = static_cast<float>(c[j] * scale);
    for (std::int64_t j = 0; j < r; ++j) *row++ = static_cast<float>(seen.k_pe[static_cast<std::size_t>(t * r + j)]);
  }
  return keys;
}

Window window_of(const ModelConfig& config, const TplaOptions& options, const TplaLayer& scalars,
                 const ObservedLayer& seen, std::span<const std::int32_t> segments) {
  const std::int64_t d = config.kv_lora_rank, tokens = static_cast<std::int64_t>(seen.c.size()) / d;
  Window window;
  window.q = Tensor::unrecorded("q", DType::f32, {tokens, config.num_attention_heads, config.qk_head_dim()});
  std::transform(seen.q.begin(), seen.q.end(), window.q.data<float>(), [](double x) { return static_cast<float>(x); });
  for (int i = 0; i < options.num_shards; ++i) {
    const bool sliced = options.rms == TplaRms::sliced;
    window.keys.push_back(keys_of(config, seen, options.shared(), options.shard(i, d),
                                  sliced ? scalars.rms_scale[static_cast<std::size_t>(i)] : 0));
  }
  window.whole = keys_of(config, seen, {}, {0, d}, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (t == 0 || segments[static_cast<std::size_t>(t)] != segments[static_cast<std::size_t>(t - 1)]) {
      window.runs.push_back({.row = t, .position = t, .segment = segments[static_cast<std::size_t>(t)]});
    }
    ++window.runs.back().length;
  }
  return window;
}

/// What a set of keys is: which columns, which of them give values, and κ of its own columns.
struct ShardView {
  const Tensor& keys;
  TplaRange shared, own;
  const std::vector<double>* kappa = nullptr;  // [h, g]; null: 1
  std::size_t shard = 0, num_shards = 1;
  bool sums_shared = true;
};

/// One layer's attention over shards, forward and backward.
class LayerAligner {
 public:
  LayerAligner(RankContext& ctx, const ModelConfig& config, const TplaOptions& options, const TplaLayer& scalars,
               const Tensor& o_proj)
      : ctx_(ctx), config_(config), options_(options), scalars_(scalars), o_proj_(o_proj) {}

  void set_target(Window& window, const Tensor& kv_b) const;
  /// The loss of a window; adds its gradient to `gradient` [h(n + v), d] where that is defined.
  double loss(const Window& window, const Tensor& kv_b, const Tensor& gradient) const;

 private:
  struct Pass {
    AttentionInputs in;
    Tensor out, lse;
  };
  std::vector<ShardView> views_of(const Window& window) const;
  Pass forward(const Window& window, const ShardView& view, const Tensor& kv_b, const Tensor& attention) const;
  void backward(const Window& window, const ShardView& view, const Pass& pass, const Tensor& kv_b,
                const Tensor& dattention, const Tensor& gradient) const;
  void scale_own(const ShardView& view, const Tensor& columns) const;
  UpProjectionViews views(const Tensor& kv_b) const {
    return up_projection_views(config_, kv_b, {0, config_.num_attention_heads});
  }
  Tensor empty(std::string_view name, Shape shape) const {
    return ctx_.empty(name, MemoryClass::workspace, DType::f32, std::move(shape));
  }
  Tensor output_of(const Tensor& attention) const;

  RankContext& ctx_;
  const ModelConfig& config_;
  const TplaOptions& options_;
  const TplaLayer& scalars_;
  const Tensor& o_proj_;
};

std::vector<ShardView> LayerAligner::views_of(const Window& window) const {
  std::vector<ShardView> result;
  for (std::size_t i = 0; i < window.keys.size(); ++i) {
    const TplaRange own = options_.shard(static_cast<int>(i), config_.kv_lora_rank);
    if (own.count == 0 && i > 0) continue;  // all columns are shared: the first shard has said it all
    result.push_back({window.keys[i], options_.shared(), own, &scalars_.kappa, i, window.keys.size(), i == 0});
  }
  return result;
}

/// columns [T, h, w] times κ of their head.
void LayerAligner::scale_own(const ShardView& view, const Tensor& columns) const {
  if (view.kappa == nullptr || columns.size(2) == 0) return;
  for (std::int64_t head = 0; head < columns.size(1); ++head) {
    const double kappa = (*view.kappa)[static_cast<std::size_t>(head) * view.num_shards + view.shard];
    const Tensor part = columns.select(1, head);
    if (kappa != 1) scaled_sum(ctx_, "κ", part, Tensor(), kappa, part);
  }
}

/// Adds the values of one set of keys to `attention` [T, h, v].
LayerAligner::Pass LayerAligner::forward(const Window& window, const ShardView& view, const Tensor& kv_b,
                                         const Tensor& attention) const {
  const std::int64_t n = config_.qk_nope_head_dim, r = config_.qk_rope_head_dim, m = view.shared.count;
  const std::int64_t w = view.own.count, tokens = window.q.size(0), h = window.q.size(1);
  const UpProjectionViews up = views(kv_b);
  const Tensor q_nope = by_head(window.q.slice(2, 0, n)), queries = empty("queries", {tokens, h, m + w + r});
  const auto absorb = [&](TplaRange columns, std::int64_t to) {
    if (columns.count == 0) return;
    matmul(ctx_, "absorb q", q_nope, up.w_uk.slice(2, columns.begin, columns.count),
           by_head(queries.slice(2, to, columns.count)));
  };
  absorb(view.shared, 0);
  absorb(view.own, m);
  scale_own(view, queries.slice(2, m, w));
  if (r > 0) copy(ctx_, "q_pe", window.q.slice(2, n, r), queries.slice(2, m + w, r));
  Pass pass{.in = {.q = queries, .k = view.keys, .v = view.keys.slice(2, 0, m + w)}};
  pass.in.query_runs = pass.in.key_runs = window.runs;
  pass.in.scale = softmax_scale(config_);
  pass.out = empty("o", {tokens, h, m + w});
  pass.lse = empty("lse", {h, tokens});
  fused_attention_forward(ctx_, pass.in, pass.out, pass.lse);
  const auto add_values = [&](TplaRange columns, std::int64_t from) {
    if (columns.count == 0) return;
    matmul(ctx_, "W_UV o", by_head(pass.out.slice(2, from, columns.count)),
           up.w_uv.slice(2, columns.begin, columns.count).transpose(1, 2), by_head(attention), true);
  };
  add_values(view.own, m);
  if (view.sums_shared) add_values(view.shared, 0);
  return pass;
}

void LayerAligner::backward(const Window& window, const ShardView& view, const Pass& pass, const Tensor& kv_b,
                            const Tensor& dattention, const Tensor& gradient) const {
  const std::int64_t n = config_.qk_nope_head_dim, m = view.shared.count, w = view.own.count;
  const UpProjectionViews up = views(kv_b), dup = views(gradient);
  const Tensor dout = ctx_.zeros("d o", MemoryClass::workspace, DType::f32, pass.out.shape());
  const auto values = [&](TplaRange columns, std::int64_t at) {
    if (columns.count == 0) return;
    const Tensor o = by_head(pass.out.slice(2, at, columns.count));
    matmul(ctx_, "d o", by_head(dattention), up.w_uv.slice(2, columns.begin, columns.count),
           by_head(dout.slice(2, at, columns.count)));
    matmul(ctx_, "d W_UV", by_head(dattention).transpose(1, 2), o, dup.w_uv.slice(2, columns.begin, columns.count),
           true);
  };
  values(view.own, m);
  if (view.sums_shared) values(view.shared, 0);
  const Tensor dq = empty("d q", pass.in.q.shape()), dk = empty("d k", pass.in.k.shape()),
               dv = empty("d v", pass.in.v.shape());
  fused_attention_backward(ctx_, pass.in, pass.out, pass.lse, dout, {.dq = dq, .dk = dk, .dv = dv});
  scale_own(view, dq.slice(2, m, w));
  const Tensor q_nope = by_head(window.q.slice(2, 0, n)).transpose(1, 2);
  const auto absorbed = [&](TplaRange columns, std::int64_t at) {
    if (columns.count == 0) return;
    matmul(ctx_, "d W_UK", q_nope, by_head(dq.slice(2, at, columns.count)),
           dup.w_uk.slice(2, columns.begin, columns.count), true);
  };
  absorbed(view.shared, 0);
  absorbed(view.own, m);
}

/// [T, D].
Tensor LayerAligner::output_of(const Tensor& attention) const {
  Tensor y = empty("y", {attention.size(0), config_.hidden_size});
  matmul(ctx_, "o_proj", attention.flatten(1, 2), o_proj_.transpose(0, 1), y);
  return y;
}

void LayerAligner::set_target(Window& window, const Tensor& kv_b) const {
  const Shape shape = {window.q.size(0), window.q.size(1), config_.v_head_dim};
  const Tensor attention = ctx_.zeros("attention", MemoryClass::workspace, DType::f32, shape);
  forward(window, {.keys = window.whole, .own = {0, config_.kv_lora_rank}}, kv_b, attention);
  window.target = output_of(attention);
  for (std::int64_t i = 0; i < window.target.numel(); ++i) {
    window.norm += std::pow(static_cast<double>(window.target.data<float>()[i]), 2);
  }
  window.whole = Tensor();
}

double LayerAligner::loss(const Window& window, const Tensor& kv_b, const Tensor& gradient) const {
  const Shape shape = {window.q.size(0), window.q.size(1), config_.v_head_dim};
  const Tensor attention = ctx_.zeros("attention", MemoryClass::workspace, DType::f32, shape);
  const std::vector<ShardView> shards = views_of(window);
  std::vector<Pass> passes;
  for (const ShardView& view : shards) passes.push_back(forward(window, view, kv_b, attention));
  const Tensor y = output_of(attention);
  double sum = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const double difference = static_cast<double>(y.data<float>()[i]) - window.target.data<float>()[i];
    sum += difference * difference;
    y.data<float>()[i] = static_cast<float>(2 * difference / window.norm);
  }
  if (gradient) {
    const Tensor dattention = empty("d attention", shape);
    matmul(ctx_, "d attention", y, o_proj_, dattention.flatten(1, 2));
    for (std::size_t i = 0; i < shards.size(); ++i) {
      backward(window, shards[i], passes[i], kv_b, dattention, gradient);
    }
  }
  return sum / window.norm;
}

/// A model of nothing but this layer's attention, so that the optimiser of training holds kv_b.
ModelConfig one_layer(ModelConfig config) {
  config.num_hidden_layers = 1;
  config.vocab_size = 1;
  config.moe = {};
  config.intermediate_size = 1;
  config.tie_word_embeddings = true;
  return config;
}

AlignedLayer train_layer(RankContext& ctx, const ModelConfig& config, const LayerAligner& aligner,
                         std::vector<Window>& windows, const std::vector<double>& kv_b,
                         const AlignmentOptions& alignment) {
  const ModelConfig single = one_layer(config);
  ModelWeights start = initial_model_weights(single, 1, DType::f32);
  float* values = start.layers[0].attention.kv_b_proj.data<float>();
  double squares = 0;
  for (std::size_t i = 0; i < kv_b.size(); ++i) {
    values[i] = static_cast<float>(kv_b[i]);
    squares += kv_b[i] * kv_b[i];
  }
  Parameters parameters(ctx, single, DType::f32);
  parameters.set(start);
  const Tensor weight = parameters.weights.layers[0].attention.kv_b_proj;
  const Tensor gradient =
      parameters.view(parameters.gradient, parameters.find("model.layers.0.self_attn.kv_b_proj.weight"));
  for (Window& window : windows) aligner.set_target(window, weight);
  AdamWOptions adamw{.weight_decay = 0, .clip_norm = 0};
  adamw.learning_rate = alignment.learning_rate * std::sqrt(squares / static_cast<double>(kv_b.size()));
  adamw.min_learning_rate = adamw.learning_rate / 10;
  adamw.warmup_steps = std::min<std::int64_t>(10, alignment.steps / 4);
  const std::size_t trained = std::max<std::size_t>(1, windows.size() - 1);
  AlignedLayer result{.before = aligner.loss(windows.back(), weight, Tensor())};
  for (std::int64_t step = 0; step < alignment.steps; ++step) {
    std::fill_n(parameters.gradient.data<float>(), parameters.gradient.numel(), 0.0f);
    aligner.loss(windows[static_cast<std::size_t>(step) % trained], weight, gradient);
    adamw_step(ctx, parameters, adamw, step, learning_rate(adamw, step, alignment.steps), 0);
    ctx.ledger().clear();
    ctx.ops().clear();
  }
  result.after = aligner.loss(windows.back(), weight, Tensor());
  result.kv_b = widened(weight);
  return result;
}

}  // namespace

std::vector<AlignedLayer> align_layers(const ModelConfig& config, const ModelWeights& weights,
                                       const TplaOptions& options, std::span<const ShardedLayer> layers,
                                       std::span<const Sample> samples, const AlignmentOptions& alignment,
                                       int num_threads, const ConversionProgress& progress) {
  const auto taken = samples.first(std::min(samples.size(), static_cast<std::size_t>(alignment.windows)));
  std::vector<std::vector<Window>> windows(layers.size());
  observe_forward(config, weights, taken, num_threads, [&](ObservedLayer&& seen) {
    const auto at = static_cast<std::size_t>(seen.layer);
    if (!layers[at].rotation.empty()) rotate_latents(config, layers[at].rotation, num_threads, seen.c);
    windows[at].push_back(
        window_of(config, options, layers[at].scalars, seen, taken[static_cast<std::size_t>(seen.sample)].segments));
  });
  std::vector<AlignedLayer> result;
  run_group({.num_ranks = 1, .threads_per_rank = num_threads}, [&](RankContext& ctx) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (progress) progress("aligning: layer", static_cast<std::int64_t>(l), std::ssize(layers));
      const LayerAligner aligner(ctx, config, options, layers[l].scalars, weights.layers[l].attention.o_proj);
      result.push_back(train_layer(ctx, config, aligner, windows[l], layers[l].kv_b, alignment));
      windows[l].clear();
    }
  });
  return result;
}

}  // namespace isomer
