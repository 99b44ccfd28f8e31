#include "train/language_model.h"

#include <algorithm>
#include <cstring>

#include "comm/communicator.h"
#include "cost/op_cost.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace isomer {

namespace {

/// The layout without recompute=block, which the model does itself, FFN included.
Layout without_block_recomputation(const Layout& layout) {
  Layout result = layout;
  for (LayoutAxis& axis : result.axes) {
    const auto found = axis.options.find("recompute");
    if (found != axis.options.end() && found->second == "block") axis.options.erase(found);
  }
  return result;
}

bool recomputes_block(const Layout& layout) {
  return std::any_of(layout.axes.begin(), layout.axes.end(), [](const LayoutAxis& axis) {
    const auto found = axis.options.find("recompute");
    return found != axis.options.end() && found->second == "block";
  });
}

void check_fit(const RankContext& ctx, const LanguageModelOptions& o) {
  const std::string reason = why_unfit(o.layout, o.config, ctx.world_size(), o.seq, o.core);
  if (!reason.empty()) invalid_argument("--layout {}: {}", to_string(o.layout), reason);
}

/// Gradients are summed in pieces of this size, which bounds what a sum stages.
constexpr std::int64_t kBucketElements = std::int64_t{1} << 24;

/// A [rows, width] view of any tensor, for elementwise sums.
Tensor as_rows(const Tensor& t) {
  if (t.dim() == 1) return t.unflatten(0, {1, t.size(0)});
  return t;
}

}  // namespace

LanguageModel::LanguageModel(RankContext& ctx, LanguageModelOptions options) : options_(std::move(options)) {
  check_fit(ctx, options_);
  recomputes_layers_ = recomputes_block(options_.layout);
  const Layout layout = without_block_recomputation(options_.layout);
  scheme_ = make_sequence_scheme(layout, options_.config);
  tokens_ = token_shards_of(layout, options_.seq, options_.batch);
  groups_ = make_sequence_groups(ctx, layout);
  rope_ = make_rope_rows(ctx, options_.config, options_.dtype, 0, tokens_.positions(groups_.sequence->rank()),
                         options_.batch, options_.seq);
}

std::vector<std::int64_t> LanguageModel::row_tokens() const {
  std::vector<std::int64_t> tokens;
  for (const IndexRange& range : tokens_.positions(groups_.sequence->rank())) {
    for (std::int64_t position = range.begin; position < range.end(); ++position) {
      for (std::int64_t b = 0; b < options_.batch; ++b) tokens.push_back(b * options_.seq + position);
    }
  }
  return tokens;
}

LanguageModel::Rows LanguageModel::rows_of(RankContext& ctx, std::span<const Sample> samples) const {
  ISOMER_CHECK(static_cast<std::int64_t>(samples.size()) == options_.batch, "{} samples for a batch of {}",
               samples.size(), options_.batch);
  Rows rows;
  for (const std::int64_t token : row_tokens()) {
    const Sample& sample = samples[static_cast<std::size_t>(token / options_.seq)];
    rows.ids.push_back(sample.ids.at(static_cast<std::size_t>(token % options_.seq)));
    rows.targets.push_back(sample.targets.at(static_cast<std::size_t>(token % options_.seq)));
  }
  for (const Sample& sample : samples) {
    auto& begins = rows.documents.emplace_back();
    for (std::size_t s = 0; s < sample.segments.size(); ++s) {
      if (s == 0 || sample.segments[s] != sample.segments[s - 1]) begins.push_back(static_cast<std::int64_t>(s));
    }
  }
  ctx.heartbeat().fetch_add(1, std::memory_order_relaxed);
  return rows;
}

SequenceBlock LanguageModel::block_of(const ModelWeights& weights, std::int64_t layer, const Rows& rows) const {
  return {.layer = {options_.config, weights.layers[static_cast<std::size_t>(layer)].attention, rope_},
          .tokens = tokens_,
          .groups = groups_,
          .core = options_.core,
          .document_starts = rows.documents};
}

RoutingSource LanguageModel::routing_source(std::int64_t layer) const {
  return routing_of_ ? routing_of_(layer) : RoutingSource{};
}

Tensor LanguageModel::layer_forward(RankContext& ctx, const ModelWeights& weights, std::int64_t layer, const Rows& rows,
                                    Tensor x, const RoutingSource& routing, LayerSaved& saved) {
  SequenceScheme::Forward attention = scheme_->forward(ctx, block_of(weights, layer, rows), std::move(x));
  saved.attention = std::move(attention.saved);
  attention.y.reclassify(MemoryClass::saved);  // the FFN keeps its input
  const FfnLayer ffn{options_.config, weights.layers[static_cast<std::size_t>(layer)]};
  return ffn_forward(ctx, ffn, attention.y, routing, saved.ffn);
}

Tensor LanguageModel::layers_forward(RankContext& ctx, const ModelWeights& weights, const Rows& rows,
                                     std::vector<LayerSaved>* saved) {
  const PhaseScope phase(ctx, Phase::forward);
  Tensor x = embedding_forward(ctx, options_.config, weights.embed_tokens, rows.ids);
  for (std::int64_t l = 0; l < options_.config.num_hidden_layers; ++l) {
    LayerSaved kept;
    x.reclassify(MemoryClass::saved);
    const Tensor input = x;
    ctx.observe("layer input", x);
    x = layer_forward(ctx, weights, l, rows, std::move(x), routing_source(l), kept);
    if (routing_sink_ && weights.layers[static_cast<std::size_t>(l)].is_moe()) routing_sink_(l, kept.ffn.routing);
    if (saved == nullptr) continue;
    if (recomputes_layers_) {
      Routing routing = std::move(kept.ffn.routing);
      kept = LayerSaved{.x = input, .routing = std::move(routing)};
    }
    saved->push_back(std::move(kept));
  }
  return x;
}

Tensor LanguageModel::layer_backward(RankContext& ctx, const Parameters& parameters, std::int64_t layer,
                                     const Rows& rows, LayerSaved saved, Tensor dy) {
  if (recomputes_layers_) {
    const RoutingSource routing{.kind = RoutingSource::Kind::replayed, .replay = &saved.routing};
    layer_forward(ctx, parameters.weights, layer, rows, std::move(saved.x), routing, saved);
  }
  const FfnLayer ffn{options_.config, parameters.weights.layers[static_cast<std::size_t>(layer)]};
  FfnGradients ffn_gradients;
  Tensor dx = ffn_backward(ctx, ffn, std::move(saved.ffn), std::move(dy), ffn_gradients);
  add_gradients(ctx, parameters, layer, ffn_gradients);
  SequenceScheme::Backward attention =
      scheme_->backward(ctx, block_of(parameters.weights, layer, rows), std::move(saved.attention), std::move(dx));
  add_gradients(ctx, parameters, layer, attention.gradients);
  return attention.dx;
}

HeadLoss LanguageModel::forward_backward(RankContext& ctx, const Parameters& parameters,
                                         std::span<const Sample> samples, double scale) {
  const Rows rows = rows_of(ctx, samples);
  std::vector<LayerSaved> saved;
  Tensor x = layers_forward(ctx, parameters.weights, rows, &saved);

  const PhaseScope phase(ctx, Phase::backward);
  Tensor dx = ctx.empty("dx", MemoryClass::workspace, x.dtype(), x.shape());
  Tensor dnorm = ctx.empty("d norm", MemoryClass::gradient, DType::f32, {x.size(1)});
  const HeadLayer head{options_.config, parameters.weights.norm, parameters.weights.lm_head};
  const bool tied = options_.config.tie_word_embeddings;
  const Tensor dembed = gradient_of(parameters, "model.embed_tokens.weight");
  const HeadGradients gradients{
      .dx = dx, .dnorm = dnorm, .dlm_head = tied ? dembed : gradient_of(parameters, "lm_head.weight")};
  const HeadLoss loss = head_loss_and_gradients(ctx, head, x, rows.targets, scale, gradients);
  x = Tensor();
  add_gradient(ctx, parameters, "model.norm.weight", dnorm);
  for (std::int64_t l = options_.config.num_hidden_layers - 1; l >= 0; --l) {
    LayerSaved mine = std::move(saved.back());
    saved.pop_back();
    dx = layer_backward(ctx, parameters, l, rows, std::move(mine), std::move(dx));
  }
  embedding_backward(ctx, options_.config, rows.ids, dx, dembed);
  return loss;
}

std::vector<double> LanguageModel::token_losses(RankContext& ctx, const ModelWeights& weights,
                                                std::span<const Sample> samples) {
  const Rows rows = rows_of(ctx, samples);
  const Tensor x = layers_forward(ctx, weights, rows, nullptr);
  const PhaseScope phase(ctx, Phase::forward);
  return head_token_losses(ctx, {options_.config, weights.norm, weights.lm_head}, x, rows.targets);
}

Tensor LanguageModel::logits(RankContext& ctx, const ModelWeights& weights, std::span<const Sample> samples) {
  const Rows rows = rows_of(ctx, samples);
  const Tensor x = layers_forward(ctx, weights, rows, nullptr);
  const PhaseScope phase(ctx, Phase::forward);
  return head_logits(ctx, {options_.config, weights.norm, weights.lm_head}, x);
}

Tensor LanguageModel::gradient_of(const Parameters& parameters, const std::string& name) const {
  return parameters.view(parameters.gradient, parameters.find(name));
}

void LanguageModel::add_gradient(RankContext& ctx, const Parameters& parameters, const std::string& name,
                                 const Tensor& gradient, std::int64_t first_row) {
  const Tensor sum = gradient_of(parameters, name).slice(0, first_row, gradient.size(0));
  add(ctx, "accumulate gradient", as_rows(sum), as_rows(gradient), as_rows(sum));
}

void LanguageModel::add_gradients(RankContext& ctx, const Parameters& parameters, std::int64_t layer,
                                  const BlockGradients& block) {
  const std::int64_t heads = options_.config.num_attention_heads;
  block.tensors.for_each([&](std::string_view name, const Tensor& gradient) {
    std::int64_t first_row = 0;
    if (name == "self_attn.kv_b_proj.weight") {
      up_projection_by_heads_ = block.kv_b_heads.count != heads;
      first_row = block.kv_b_heads.begin * (gradient.size(0) / block.kv_b_heads.count);
    }
    add_gradient(ctx, parameters, fmt::format("model.layers.{}.{}", layer, name), gradient, first_row);
  });
}

void LanguageModel::add_gradients(RankContext& ctx, const Parameters& parameters, std::int64_t layer,
                                  const FfnGradients& ffn) {
  // The same names in the same order as the weights'.
  ModelWeights whole;
  whole.layers.resize(static_cast<std::size_t>(layer) + 1);
  LayerWeights& mine = whole.layers.back();
  mine.post_attention_layernorm = ffn.post_attention_layernorm;
  mine.mlp = ffn.mlp;
  mine.moe = ffn.moe;
  mine.moe.e_score_correction_bias = Tensor();
  whole.for_each(
      [&](const std::string& name, const Tensor& gradient) { add_gradient(ctx, parameters, name, gradient); });
}

void LanguageModel::sync_gradients(RankContext& ctx, const Parameters& parameters) const {
  const PhaseScope phase(ctx, Phase::gradient_sync);
  if (ctx.comm().size() == 1) return;
  const std::int64_t shared = up_projection_by_heads_ ? parameters.first_up_projection() : parameters.gradient.numel();
  for (std::int64_t begin = 0; begin < shared; begin += kBucketElements) {
    ctx.comm().all_reduce("gradients", parameters.gradient.slice(0, begin, std::min(kBucketElements, shared - begin)));
  }
  if (!up_projection_by_heads_) return;
  const HeadShards shards{options_.config.num_attention_heads, groups_.inner->size()};
  for (const Parameter& p : parameters.list()) {
    if (!p.is_up_projection) continue;
    const Tensor whole = parameters.view(parameters.gradient, p);
    const std::int64_t per_head = whole.size(0) / shards.num_heads;
    const auto rows_of_rank = [&](int rank) {
      const IndexRange heads = shards.heads(rank);
      return whole.slice(0, heads.begin * per_head, heads.count * per_head);
    };
    const Tensor mine = rows_of_rank(groups_.inner->rank());
    if (groups_.same_heads->size() > 1) groups_.same_heads->all_reduce("kv_b_proj", mine);
    std::vector<Tensor> receive;
    for (int peer = 0; peer < groups_.inner->size(); ++peer) receive.push_back(rows_of_rank(peer));
    groups_.inner->all_gather("kv_b_proj", mine, receive);
  }
}

}  // namespace isomer
