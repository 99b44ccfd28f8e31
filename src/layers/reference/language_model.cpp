#include "layers/reference/language_model.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"
#include "layers/reference/attention_block.h"
#include "layers/reference/ffn.h"
#include "layers/reference/head.h"
#include "layers/reference/linear_ops.h"

namespace isomer {
namespace {

using reference::NamedValues;
using reference::Values;

/// Rows of one document, in order of position.
struct Document {
  std::vector<std::size_t> rows;
  std::int64_t first_position = 0;
};

void add_to(Values& sum, const Values& part) {
  if (sum.empty()) sum.resize(part.size());
  for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
}

/// Forward and backward of the model over one set of inputs.
class LanguageModel {
 public:
  LanguageModel(const ModelConfig& config, const LanguageModelReferenceInput& input, int num_threads);

  LanguageModelReferenceResult run();

 private:
  /// A weight of the given shape; the others are complained about at the end.
  const Values& weight(const std::string& name, const Shape& shape);
  /// The weights whose names begin with `prefix`, without it.
  NamedValues weights_below(const std::string& prefix);
  MlpReferenceWeights mlp_weights(const std::string& prefix, std::int64_t width);
  FfnReferenceWeights ffn_weights(std::int64_t layer);
  const std::string& head_name() const { return config_.tie_word_embeddings ? kEmbedding : kHead; }

  void split_documents();
  Values embedding();
  void embedding_backward(const Values& dx);
  /// The attention block of a layer: document by document. dy empty: returns y; else enters gradients and returns dx.
  Values attention(std::int64_t layer, const Values& x, const Values& dy);
  Values ffn(std::int64_t layer, const Values& x, const Values& dy);
  /// The loss; returns the gradient of the last layer's output.
  Values head(const Values& x);
  void enter(const std::string& prefix, const NamedValues& gradients);
  void refuse_unused_weights() const;

  Values rows_of(const Values& all, const Document& document) const;

  inline static const std::string kEmbedding = "model.embed_tokens.weight";
  inline static const std::string kHead = "lm_head.weight";

  const ModelConfig& config_;
  const LanguageModelReferenceInput& in_;
  const int num_threads_;
  const std::size_t num_tokens_, hidden_;
  std::vector<Document> documents_;
  std::int64_t run_length_ = 0;
  std::set<std::string> used_;
  LanguageModelReferenceResult result_;
};

LanguageModel::LanguageModel(const ModelConfig& config, const LanguageModelReferenceInput& input, int num_threads)
    : config_(config),
      in_(input),
      num_threads_(num_threads),
      num_tokens_(input.tokens.size()),
      hidden_(static_cast<std::size_t>(config.hidden_size)) {
  if (num_tokens_ == 0) invalid_argument("no tokens: at least one is needed");
  for (const std::size_t size : {in_.targets.size(), in_.segments.size(), in_.positions.size()}) {
    if (size != num_tokens_) invalid_argument("{} tokens with {} targets, segments or positions", num_tokens_, size);
  }
  if (!in_.experts.empty() && static_cast<std::int64_t>(in_.experts.size()) != config.num_hidden_layers) {
    invalid_argument("experts of {} layers are given: the model has {}", in_.experts.size(), config.num_hidden_layers);
  }
  result_.experts.resize(static_cast<std::size_t>(config.num_hidden_layers));
  run_length_ = in_.run_length;
  if (run_length_ == 0) run_length_ = *std::max_element(in_.positions.begin(), in_.positions.end()) + 1;
  split_documents();
}

void LanguageModel::split_documents() {
  std::map<int, Document> by_segment;
  for (std::size_t row = 0; row < num_tokens_; ++row) by_segment[in_.segments[row]].rows.push_back(row);
  for (auto& [segment, document] : by_segment) {
    std::sort(document.rows.begin(), document.rows.end(),
              [&](std::size_t a, std::size_t b) { return in_.positions[a] < in_.positions[b]; });
    document.first_position = in_.positions[document.rows.front()];
    for (std::size_t i = 0; i < document.rows.size(); ++i) {
      const std::int64_t expected = document.first_position + static_cast<std::int64_t>(i);
      if (in_.positions[document.rows[i]] != expected) {
        invalid_argument("segment {}: position {} where {} would follow; positions of a segment are consecutive",
                         segment, in_.positions[document.rows[i]], expected);
      }
    }
    documents_.push_back(document);
  }
}

LanguageModelReferenceResult LanguageModel::run() {
  std::vector<Values> inputs, middles;  // of every layer: before attention, before the FFN
  Values x = embedding();
  for (std::int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    inputs.push_back(x);
    middles.push_back(attention(layer, x, {}));
    x = ffn(layer, middles.back(), {});
    result_.layer_outputs.push_back(x);
  }
  Values dx = head(x);
  refuse_unused_weights();
  for (std::int64_t layer = config_.num_hidden_layers; layer-- > 0;) {
    const auto index = static_cast<std::size_t>(layer);
    dx = ffn(layer, middles[index], dx);
    dx = attention(layer, inputs[index], dx);
  }
  embedding_backward(dx);
  return std::move(result_);
}

const Values& LanguageModel::weight(const std::string& name, const Shape& shape) {
  const auto found = in_.weights.find(name);
  if (found == in_.weights.end()) invalid_argument("weight '{}' is missing", name);
  reference::check_size(name, found->second, shape, false);
  used_.insert(name);
  return found->second;
}

NamedValues LanguageModel::weights_below(const std::string& prefix) {
  NamedValues below;
  for (auto it = in_.weights.lower_bound(prefix); it != in_.weights.end() && it->first.starts_with(prefix); ++it) {
    below[it->first.substr(prefix.size())] = it->second;
    used_.insert(it->first);
  }
  return below;
}

Values LanguageModel::embedding() {
  const Values& table = weight(kEmbedding, {config_.vocab_size, config_.hidden_size});
  Values x;
  for (const std::int32_t id : in_.tokens) {
    if (id < 0 || id >= config_.vocab_size) {
      invalid_argument("token {}: the vocabulary of {} has {}", id, config_.name, config_.vocab_size);
    }
    for (std::size_t i = 0; i < hidden_; ++i) {
      x.push_back(config_.scale_emb * table[static_cast<std::size_t>(id) * hidden_ + i]);
    }
  }
  return x;
}

void LanguageModel::embedding_backward(const Values& dx) {
  Values& dtable = result_.gradients[kEmbedding];  // a tied head's part stands there already
  dtable.resize(in_.weights.at(kEmbedding).size());
  for (std::size_t row = 0; row < num_tokens_; ++row) {
    const std::size_t id = static_cast<std::size_t>(in_.tokens[row]);
    for (std::size_t i = 0; i < hidden_; ++i) dtable[id * hidden_ + i] += config_.scale_emb * dx[row * hidden_ + i];
  }
}

Values LanguageModel::rows_of(const Values& all, const Document& document) const {
  Values rows;
  for (const std::size_t row : document.rows) {
    for (std::size_t i = 0; i < hidden_ && !all.empty(); ++i) rows.push_back(all[row * hidden_ + i]);
  }
  return rows;
}

Values LanguageModel::attention(std::int64_t layer, const Values& x, const Values& dy) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  NamedValues weights = weights_below(prefix + "self_attn.");
  NamedValues named = {{"input_layernorm.weight", weight(prefix + "input_layernorm.weight", {config_.hidden_size})}};
  for (auto& [name, values] : weights) named["self_attn." + name] = std::move(values);
  Values out(x.size());
  for (const Document& document : documents_) {
    const Values own_x = rows_of(x, document), own_dy = rows_of(dy, document);
    const AttentionReferenceResult block =
        attention_block_reference(config_,
                                  {.weights = named,
                                   .seq = static_cast<std::int64_t>(document.rows.size()),
                                   .first_position = document.first_position,
                                   .run_length = run_length_,
                                   .x = own_x,
                                   .dy = own_dy},
                                  num_threads_);
    for (std::size_t i = 0; i < document.rows.size() * hidden_; ++i) {
      const std::size_t at = document.rows[i / hidden_] * hidden_ + i % hidden_;
      out[at] = dy.empty() ? block.y[i] : block.dx[i];
    }
    enter(prefix, block.gradients);
  }
  return out;
}

MlpReferenceWeights LanguageModel::mlp_weights(const std::string& prefix, std::int64_t width) {
  return {.gate = weight(prefix + "gate_proj.weight", {width, config_.hidden_size}),
          .up = weight(prefix + "up_proj.weight", {width, config_.hidden_size}),
          .down = weight(prefix + "down_proj.weight", {config_.hidden_size, width})};
}

FfnReferenceWeights LanguageModel::ffn_weights(std::int64_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer), mlp = prefix + "mlp.";
  const MoeConfig& moe = config_.moe;
  FfnReferenceWeights w;
  w.norm = weight(prefix + "post_attention_layernorm.weight", {config_.hidden_size});
  if (!config_.is_moe_layer(layer)) {
    w.mlp = mlp_weights(mlp, config_.intermediate_size);
    return w;
  }
  w.router = weight(mlp + "gate.weight", {moe.n_routed_experts, config_.hidden_size});
  if (moe.router == RouterKind::sigmoid_noaux_tc) {
    w.bias = weight(mlp + "gate.e_score_correction_bias", {moe.n_routed_experts});
  }
  for (std::int64_t e = 0; e < moe.n_routed_experts; ++e) {
    w.experts.push_back(mlp_weights(fmt::format("{}experts.{}.", mlp, e), moe.moe_intermediate_size));
  }
  if (moe.n_shared_experts > 0) {
    w.shared = mlp_weights(mlp + "shared_experts.", moe.n_shared_experts * moe.moe_intermediate_size);
  }
  return w;
}

Values LanguageModel::ffn(std::int64_t layer, const Values& x, const Values& dy) {
  const auto index = static_cast<std::size_t>(layer);
  std::vector<std::int32_t> experts;
  if (config_.is_moe_layer(layer)) {
    if (!in_.experts.empty()) experts = in_.experts[index];
    if (!dy.empty()) experts = result_.experts[index];
    const std::size_t expected = num_tokens_ * static_cast<std::size_t>(config_.moe.num_experts_per_tok);
    if (!experts.empty() && experts.size() != expected) {
      invalid_argument("layer {}: {} experts are given for {} tokens, {} each", layer, experts.size(), num_tokens_,
                       config_.moe.num_experts_per_tok);
    }
    for (const std::int32_t e : experts) {
      if (e >= 0 && e < config_.moe.n_routed_experts) continue;
      invalid_argument("layer {}: expert {}: there are {}", layer, e, config_.moe.n_routed_experts);
    }
  }
  FfnReferenceResult result = ffn_reference(config_, ffn_weights(layer), x, dy, experts);
  if (dy.empty()) {
    result_.experts[index] = std::move(result.experts);
    return std::move(result.y);
  }
  enter(fmt::format("model.layers.{}.", layer), result.gradients);
  return std::move(result.dx);
}

Values LanguageModel::head(const Values& x) {
  const Values& norm = weight("model.norm.weight", {config_.hidden_size});
  const Values& lm_head = weight(head_name(), {config_.vocab_size, config_.hidden_size});
  for (const std::int32_t target : in_.targets) {
    if (target < config_.vocab_size) continue;
    invalid_argument("target {}: the vocabulary of {} has {}", target, config_.name, config_.vocab_size);
  }
  result_.num_targets = std::count_if(in_.targets.begin(), in_.targets.end(), [](auto target) { return target >= 0; });
  const double mean = 1 / static_cast<double>(std::max<std::int64_t>(result_.num_targets, 1));
  HeadReferenceResult head =
      head_reference(config_, norm, lm_head, x, in_.targets, in_.loss_scale != 0 ? in_.loss_scale : mean);
  result_.loss = head.loss_sum * mean;
  result_.losses = std::move(head.losses);
  result_.num_correct = head.num_correct;
  result_.gradients["model.norm.weight"] = std::move(head.dnorm);
  result_.gradients[head_name()] = std::move(head.dlm_head);
  return std::move(head.dx);
}

void LanguageModel::enter(const std::string& prefix, const NamedValues& gradients) {
  for (const auto& [name, values] : gradients) add_to(result_.gradients[prefix + name], values);
}

void LanguageModel::refuse_unused_weights() const {
  for (const auto& [name, values] : in_.weights) {
    if (used_.count(name) == 0) invalid_argument("weight '{}': {} has no place for it", name, config_.name);
  }
}

}  // namespace

LanguageModelReferenceResult language_model_reference(const ModelConfig& config,
                                                      const LanguageModelReferenceInput& input, int num_threads) {
  return LanguageModel(config, input, num_threads).run();
}

std::map<std::string, std::vector<double>> widened_model_weights(const ModelWeights& weights) {
  std::map<std::string, std::vector<double>> all;
  weights.for_each([&](const std::string& name, const Tensor& tensor) {
    Values& wide = all[name];
    wide.resize(static_cast<std::size_t>(tensor.numel()));
    visit_dtype(tensor.dtype(), [&]<class T>() {
      const T* values = tensor.data<T>();
      std::transform(values, values + wide.size(), wide.begin(), [](T value) { return static_cast<double>(value); });
    });
  });
  return all;
}

}  // namespace isomer
