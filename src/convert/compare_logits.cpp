#include "convert/compare_logits.h"

#include <algorithm>
#include <cmath>

#include "comm/group.h"
#include "convert/observed_forward.h"
#include "core/error.h"
#include "train/language_model.h"

namespace isomer {

namespace {

using Row = std::span<const double>;

double log_sum_exp(Row z) {
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const double value : z) sum += std::exp(value - largest);
  return largest + std::log(sum);
}

std::size_t argmax(Row z) { return static_cast<std::size_t>(std::max_element(z.begin(), z.end()) - z.begin()); }

void add_token(Row first, Row second, std::int32_t target, LogitDifference& sum) {
  const double lse_first = log_sum_exp(first), lse_second = log_sum_exp(second);
  double divergence = 0;
  for (std::size_t i = 0; i < first.size(); ++i) {
    const double difference = std::abs(first[i] - second[i]);
    if (!(difference <= sum.largest)) sum.largest = difference;  // a NaN stays
    sum.largest_logit = std::max(sum.largest_logit, std::abs(first[i]));
    divergence += std::exp(first[i] - lse_first) * ((first[i] - lse_first) - (second[i] - lse_second));
  }
  sum.mean_divergence += divergence;
  sum.largest_divergence = std::max(sum.largest_divergence, divergence);
  sum.top1_agreements += argmax(first) == argmax(second) ? 1 : 0;
  ++sum.num_tokens;
  if (target < 0) return;
  ++sum.num_targets;
  sum.nats_first += lse_first - first[static_cast<std::size_t>(target)];
  sum.nats_second += lse_second - second[static_cast<std::size_t>(target)];
}

}  // namespace

LogitDifference compare_logits(const ModelRef& first, const ModelRef& second, std::span<const Sample> samples,
                               int num_threads, const ConversionProgress& progress) {
  LogitDifference sum;
  if (samples.empty()) return sum;
  run_group({.num_ranks = 1, .threads_per_rank = num_threads}, [&](RankContext& ctx) {
    const auto model_of = [&](const ModelRef& ref) {
      return LanguageModel(ctx, {.config = ref.config,
                                 .layout = parse_layout("explicit:1"),
                                 .dtype = ref.weights.embed_tokens.dtype(),
                                 .seq = static_cast<std::int64_t>(samples.front().ids.size())});
    };
    LanguageModel model = model_of(first), other = model_of(second);
    for (std::size_t s = 0; s < samples.size(); ++s) {
      if (progress) progress("comparing logits: window", static_cast<std::int64_t>(s), std::ssize(samples));
      ctx.ledger().clear();
      ctx.ops().clear();
      const Tensor a = model.logits(ctx, first.weights, samples.subspan(s, 1));
      const Tensor b = other.logits(ctx, second.weights, samples.subspan(s, 1));
      for (std::int64_t t = 0; t < a.size(0); ++t) {
        add_token(widened(a.select(0, t)), widened(b.select(0, t)), samples[s].targets[static_cast<std::size_t>(t)],
                  sum);
      }
    }
  });
  sum.mean_divergence /= static_cast<double>(sum.num_tokens);
  return sum;
}

LogitDifference compare_logits(const ModelConfig& config, const ModelWeights& first, const ModelWeights& second,
                               std::span<const Sample> samples, int num_threads, const ConversionProgress& progress) {
  return compare_logits({config, first}, {config, second}, samples, num_threads, progress);
}

}  // namespace isomer
