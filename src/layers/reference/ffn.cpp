#include "layers/reference/ffn.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "kernels/reference/plain_ops.h"

namespace isomer {
namespace {

using Values = std::vector<double>;

Values widened(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  Values values(static_cast<std::size_t>(tensor.numel()));
  visit_dtype(tensor.dtype(), [&]<class T>() {
    const T* data = tensor.data<T>();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(data[i]);
  });
  return values;
}

MlpReferenceWeights widened(const MlpWeights& mlp) {
  return {widened(mlp.gate_proj), widened(mlp.up_proj), widened(mlp.down_proj)};
}

/// w [out, in] · x [in].
Values multiply(const Values& w, const Values& x) {
  Values y(w.size() / x.size());
  for (std::size_t o = 0; o < y.size(); ++o) {
    for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
  }
  return y;
}

/// dw += dy·xᵀ, dx += wᵀ·dy.
void multiply_backward(const Values& w, const Values& x, const Values& dy, Values& dw, Values& dx) {
  for (std::size_t o = 0; o < dy.size(); ++o) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      dw[o * x.size() + i] += dy[o] * x[i];
      dx[i] += dy[o] * w[o * x.size() + i];
    }
  }
}

double sigma(double x) { return 1 / (1 + std::exp(-x)); }

/// One MLP on one token.
Values mlp_forward(const MlpReferenceWeights& w, const Values& x) {
  Values a = multiply(w.gate, x);
  const Values up = multiply(w.up, x);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = a[i] * sigma(a[i]) * up[i];
  return multiply(w.down, a);
}

void mlp_backward(const MlpReferenceWeights& w, const Values& x, const Values& dy, MlpReferenceWeights& gradients,
                  Values& dx) {
  const Values gate = multiply(w.gate, x), up = multiply(w.up, x);
  Values a(gate.size()), da(gate.size()), dgate(gate.size()), dup(gate.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = gate[i] * sigma(gate[i]) * up[i];
  multiply_backward(w.down, a, dy, gradients.down, da);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double s = sigma(gate[i]);
    dgate[i] = da[i] * up[i] * (s + gate[i] * s * (1 - s));
    dup[i] = da[i] * gate[i] * s;
  }
  multiply_backward(w.gate, x, dgate, gradients.gate, dx);
  multiply_backward(w.up, x, dup, gradients.up, dx);
}

MlpReferenceWeights zeros_like(const MlpReferenceWeights& w) {
  return {Values(w.gate.size()), Values(w.up.size()), Values(w.down.size())};
}

/// Indices of `values`, largest first, the lower index of equals first.
std::vector<std::size_t> descending(const Values& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  return order;
}

/// One layer over one set of inputs.
class Ffn {
 public:
  Ffn(const ModelConfig& config, const FfnReferenceWeights& weights, const Values& x)
      : config_(config), moe_(config.moe), w_(weights), x_(x), hidden_(weights.norm.size()) {
    num_tokens_ = x.size() / hidden_;
    x_norm_.resize(x.size());
    reference::rms_norm(x.data(), w_.norm.data(), config.rms_norm_eps, static_cast<std::int64_t>(num_tokens_),
                        static_cast<std::int64_t>(hidden_), x_norm_.data());
  }

  FfnReferenceResult run(const Values& dy, const std::vector<std::int32_t>& experts) {
    result_.y.resize(x_.size());
    result_.experts = experts;
    forward();
    if (dy.size() == x_.size() && !dy.empty()) backward(dy);
    return std::move(result_);
  }

 private:
  bool is_moe() const { return !w_.router.empty(); }
  bool sigmoid() const { return moe_.router == RouterKind::sigmoid_noaux_tc; }
  bool normalised() const { return moe_.norm_topk_prob && (sigmoid() || moe_.num_experts_per_tok > 1); }
  double factor() const { return normalised() && !sigmoid() ? 1 : moe_.routed_scaling_factor; }
  std::size_t num_experts() const { return w_.experts.size(); }
  std::size_t top_k() const { return static_cast<std::size_t>(moe_.num_experts_per_tok); }
  Values token(const Values& rows, std::size_t t) const {
    return {rows.begin() + static_cast<std::ptrdiff_t>(t * hidden_),
            rows.begin() + static_cast<std::ptrdiff_t>((t + 1) * hidden_)};
  }

  Values scores_of(const Values& x) const {
    Values scores = multiply(w_.router, x);
    if (sigmoid()) {
      for (double& s : scores) s = sigma(s);
    } else {
      reference::softmax(scores.data(), static_cast<std::int64_t>(scores.size()));
    }
    return scores;
  }

  /// Choices of experts outside the best groups become −∞.
  void mask_groups(Values& choice) const {
    const auto groups = static_cast<std::size_t>(moe_.n_group), size = choice.size() / groups;
    Values group_scores;
    for (std::size_t g = 0; g < groups; ++g) {
      const auto first = choice.begin() + static_cast<std::ptrdiff_t>(g * size);
      Values members(first, first + static_cast<std::ptrdiff_t>(size));
      std::sort(members.rbegin(), members.rend());
      group_scores.push_back(members[0] + (sigmoid() ? members[1] : 0));
    }
    const auto order = descending(group_scores);
    for (std::size_t i = static_cast<std::size_t>(moe_.topk_group); i < groups; ++i) {
      std::fill_n(choice.begin() + static_cast<std::ptrdiff_t>(order[i] * size), size,
                  -std::numeric_limits<double>::infinity());
    }
  }

  void choose(const Values& scores) {
    Values choice = scores;
    for (std::size_t e = 0; e < w_.bias.size(); ++e) choice[e] += w_.bias[e];
    if (moe_.router != RouterKind::softmax_greedy && moe_.n_group > 1) mask_groups(choice);
    const auto order = descending(choice);
    for (std::size_t j = 0; j < top_k(); ++j) result_.experts.push_back(static_cast<std::int32_t>(order[j]));
  }

  std::size_t expert(std::size_t t, std::size_t j) const {
    return static_cast<std::size_t>(result_.experts[t * top_k() + j]);
  }

  double chosen_sum(std::size_t t) const {
    double sum = 1e-20;
    for (std::size_t j = 0; j < top_k(); ++j) sum += result_.scores[t * num_experts() + expert(t, j)];
    return sum;
  }

  void route() {
    const bool given = !result_.experts.empty();
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      const Values scores = scores_of(token(x_norm_, t));
      result_.scores.insert(result_.scores.end(), scores.begin(), scores.end());
      if (!given) choose(scores);
      for (std::size_t j = 0; j < top_k(); ++j) {
        const double score = scores[expert(t, j)];
        result_.weights.push_back(factor() * (normalised() ? score / chosen_sum(t) : score));
      }
    }
  }

  void forward() {
    if (is_moe()) route();
    const double scale = config_.residual_scale();
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      const Values x = token(x_norm_, t);
      Values branch(hidden_);
      const auto add = [&](const Values& part, double weight) {
        for (std::size_t i = 0; i < hidden_; ++i) branch[i] += weight * part[i];
      };
      if (!is_moe()) add(mlp_forward(w_.mlp, x), 1);
      if (!w_.shared.gate.empty()) add(mlp_forward(w_.shared, x), 1);
      for (std::size_t j = 0; is_moe() && j < top_k(); ++j) {
        add(mlp_forward(w_.experts[expert(t, j)], x), result_.weights[t * top_k() + j]);
      }
      for (std::size_t i = 0; i < hidden_; ++i) result_.y[t * hidden_ + i] = x_[t * hidden_ + i] + scale * branch[i];
    }
  }

  void router_backward(std::size_t t, const Values& dweights, Values& drouter, Values& dx) const {
    const std::size_t num = num_experts();
    const double* scores = result_.scores.data() + t * num;
    Values dscores(num), dlogits(num);
    const double sum = chosen_sum(t);
    for (std::size_t j = 0; j < top_k(); ++j) {
      if (!normalised()) dscores[expert(t, j)] += factor() * dweights[j];
      // w_j = f·s_j/Σ: every chosen score is in the sum.
      for (std::size_t i = 0; normalised() && i < top_k(); ++i) {
        const double own = i == j ? 1 / sum : 0;
        dscores[expert(t, i)] += factor() * dweights[j] * (own - scores[expert(t, j)] / (sum * sum));
      }
    }
    double mean = 0;
    for (std::size_t e = 0; e < num; ++e) mean += scores[e] * dscores[e];
    for (std::size_t e = 0; e < num; ++e) {
      dlogits[e] = sigmoid() ? dscores[e] * scores[e] * (1 - scores[e]) : scores[e] * (dscores[e] - mean);
    }
    multiply_backward(w_.router, token(x_norm_, t), dlogits, drouter, dx);
  }

  void enter(const std::string& prefix, MlpReferenceWeights gradients) {
    result_.gradients[prefix + ".gate_proj.weight"] = std::move(gradients.gate);
    result_.gradients[prefix + ".up_proj.weight"] = std::move(gradients.up);
    result_.gradients[prefix + ".down_proj.weight"] = std::move(gradients.down);
  }

  void backward(const Values& dy) {
    MlpReferenceWeights dmlp = zeros_like(w_.mlp), dshared = zeros_like(w_.shared);
    std::vector<MlpReferenceWeights> dexperts;
    for (const auto& weights : w_.experts) dexperts.push_back(zeros_like(weights));
    Values drouter(w_.router.size()), dx_norm(x_.size());
    for (std::size_t t = 0; t < num_tokens_; ++t) {
      const Values x = token(x_norm_, t);
      Values dbranch = token(dy, t), dx(hidden_), dweights(top_k());
      for (double& d : dbranch) d *= config_.residual_scale();
      if (!is_moe()) mlp_backward(w_.mlp, x, dbranch, dmlp, dx);
      if (!w_.shared.gate.empty()) mlp_backward(w_.shared, x, dbranch, dshared, dx);
      for (std::size_t j = 0; is_moe() && j < top_k(); ++j) {
        const Values out = mlp_forward(w_.experts[expert(t, j)], x);
        Values dout = dbranch;
        for (std::size_t i = 0; i < hidden_; ++i) dweights[j] += dbranch[i] * out[i];
        for (double& d : dout) d *= result_.weights[t * top_k() + j];
        mlp_backward(w_.experts[expert(t, j)], x, dout, dexperts[expert(t, j)], dx);
      }
      if (is_moe()) router_backward(t, dweights, drouter, dx);
      std::copy(dx.begin(), dx.end(), dx_norm.begin() + static_cast<std::ptrdiff_t>(t * hidden_));
    }
    if (!is_moe()) enter("mlp", std::move(dmlp));
    if (is_moe()) result_.gradients["mlp.gate.weight"] = drouter;
    for (std::size_t e = 0; e < dexperts.size(); ++e) enter(fmt::format("mlp.experts.{}", e), std::move(dexperts[e]));
    if (!w_.shared.gate.empty()) enter("mlp.shared_experts", std::move(dshared));
    norm_backward(dy, dx_norm);
  }

  void norm_backward(const Values& dy, const Values& dx_norm) {
    result_.dx.resize(x_.size());
    Values& dnorm = result_.gradients["post_attention_layernorm.weight"];
    dnorm.resize(hidden_);
    reference::rms_norm_backward({.dy = dx_norm.data(),
                                  .x = x_.data(),
                                  .weight = w_.norm.data(),
                                  .eps = config_.rms_norm_eps,
                                  .num_rows = static_cast<std::int64_t>(num_tokens_),
                                  .width = static_cast<std::int64_t>(hidden_),
                                  .dx = result_.dx.data(),
                                  .dweight = dnorm.data()});
    for (std::size_t i = 0; i < dy.size(); ++i) result_.dx[i] += dy[i];
  }

  const ModelConfig& config_;
  const MoeConfig& moe_;
  const FfnReferenceWeights& w_;
  const Values& x_;
  std::size_t hidden_, num_tokens_;
  Values x_norm_;
  FfnReferenceResult result_;
};

}  // namespace

FfnReferenceWeights widened_ffn_weights(const LayerWeights& layer) {
  FfnReferenceWeights w;
  w.norm = widened(layer.post_attention_layernorm);
  w.mlp = widened(layer.mlp);
  w.router = widened(layer.moe.gate);
  w.bias = widened(layer.moe.e_score_correction_bias);
  for (const MlpWeights& expert : layer.moe.experts) w.experts.push_back(widened(expert));
  w.shared = widened(layer.moe.shared_experts);
  return w;
}

FfnReferenceResult ffn_reference(const ModelConfig& config, const FfnReferenceWeights& weights, const Values& x,
                                 const Values& dy, const std::vector<std::int32_t>& experts) {
  const std::size_t hidden = weights.norm.size();
  if (hidden == 0 || x.size() % hidden != 0 || (!dy.empty() && dy.size() != x.size())) {
    invalid_argument("x has {} and dy {} values: rows of {} expected", x.size(), dy.size(), hidden);
  }
  return Ffn(config, weights, x).run(dy, experts);
}

}  // namespace isomer
