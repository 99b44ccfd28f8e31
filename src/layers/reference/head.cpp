#include "layers/reference/head.h"

#include <algorithm>

#include "kernels/reference/plain_ops.h"

namespace isomer {

HeadReferenceResult head_reference(const ModelConfig& config, const std::vector<double>& norm,
                                   const std::vector<double>& lm_head, const std::vector<double>& x,
                                   const std::vector<std::int32_t>& targets, double scale) {
  const std::size_t hidden = norm.size(), vocabulary = lm_head.size() / hidden, rows = targets.size();
  const double divisor =
      config.dim_model_base > 0 ? static_cast<double>(config.hidden_size) / config.dim_model_base : 1;
  HeadReferenceResult result;
  std::vector<double> x_norm(x.size()), dx_norm(x.size());
  reference::rms_norm(x.data(), norm.data(), config.rms_norm_eps, static_cast<std::int64_t>(rows),
                      static_cast<std::int64_t>(hidden), x_norm.data());
  result.logits.resize(rows * vocabulary);
  result.losses.resize(rows);
  result.dlm_head.resize(lm_head.size());
  for (std::size_t t = 0; t < rows; ++t) {
    double* logits = result.logits.data() + t * vocabulary;
    for (std::size_t c = 0; c < vocabulary; ++c) {
      for (std::size_t i = 0; i < hidden; ++i) logits[c] += x_norm[t * hidden + i] * lm_head[c * hidden + i] / divisor;
    }
    if (targets[t] < 0) continue;
    const auto target = static_cast<std::size_t>(targets[t]);
    std::vector<double> p(logits, logits + vocabulary);
    const double lse = reference::softmax(p.data(), static_cast<std::int64_t>(vocabulary));
    result.losses[t] = lse - logits[target];
    result.loss_sum += result.losses[t];
    ++result.num_targets;
    const auto best = std::max_element(logits, logits + vocabulary) - logits;
    result.num_correct += best == targets[t] ? 1 : 0;
    p[target] -= 1;
    for (std::size_t c = 0; c < vocabulary; ++c) {
      for (std::size_t i = 0; i < hidden; ++i) {
        dx_norm[t * hidden + i] += scale / divisor * p[c] * lm_head[c * hidden + i];
        result.dlm_head[c * hidden + i] += scale / divisor * p[c] * x_norm[t * hidden + i];
      }
    }
  }
  result.dx.resize(x.size());
  result.dnorm.resize(hidden);
  reference::rms_norm_backward({.dy = dx_norm.data(),
                                .x = x.data(),
                                .weight = norm.data(),
                                .eps = config.rms_norm_eps,
                                .num_rows = static_cast<std::int64_t>(rows),
                                .width = static_cast<std::int64_t>(hidden),
                                .dx = result.dx.data(),
                                .dweight = result.dnorm.data()});
  return result;
}

}  // namespace isomer
