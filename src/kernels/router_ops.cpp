#include "kernels/router_ops.h"

#include <vector>

#include "cost/op_cost.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/row_tasks.h"

namespace isomer {

namespace {

using cpu::row_kernels;

constexpr double kNormaliseEps = 1e-20;

/// body.template operator()<T>() for float32 or float64 scores.
template <class Body>
void visit_scores(std::string_view name, const Tensor& scores, Body&& body) {
  ISOMER_CHECK(scores.dtype() != DType::bf16 && scores.is_contiguous(), "{}: scores are {} {}", name,
               name_of(scores.dtype()), to_string(scores.shape()));
  if (scores.dtype() == DType::f64) {
    body.template operator()<double>();
  } else {
    body.template operator()<float>();
  }
}

void check_experts(std::string_view name, const RouterRule& rule, const Tensor& scores, std::size_t count) {
  ISOMER_CHECK(static_cast<std::int64_t>(count) == scores.size(0) * rule.top_k, "{}: {} experts of {} tokens × {}",
               name, count, scores.size(0), rule.top_k);
}

/// The index of the largest of `count` values that `open` says may be chosen; the lowest of equals. NaN is never larger
/// than another, but is chosen rather than nothing.
template <class T>
std::size_t best_open(const std::vector<T>& values, const std::vector<char>& open) {
  std::size_t best = values.size();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (open[i] != 0 && (best == values.size() || values[i] > values[best])) best = i;
  }
  return best;
}

/// One thread's scratch for one token's choice.
template <class T>
struct Chooser {
  const RouterRule& rule;
  std::vector<T> choice, group_score;
  std::vector<char> open, group_open;

  Chooser(const RouterRule& r, std::int64_t num_experts)
      : rule(r),
        choice(static_cast<std::size_t>(num_experts)),
        group_score(static_cast<std::size_t>(r.n_group)),
        open(choice.size()),
        group_open(group_score.size()) {}

  /// The sum of the group_best largest choices of a group.
  T score_of(std::size_t group, std::size_t size) {
    T sum = 0;
    std::vector<char>& free = open;  // scratch; set anew afterwards
    std::fill(free.begin(), free.end(), char{0});
    std::fill_n(free.begin() + static_cast<std::ptrdiff_t>(group * size), size, char{1});
    for (std::int64_t i = 0; i < rule.group_best; ++i) {
      T best{};
      std::size_t at = choice.size();
      for (std::size_t e = group * size; e < (group + 1) * size; ++e) {
        if (free[e] != 0 && (at == choice.size() || choice[e] > best)) best = choice[at = e];
      }
      sum += best;
      free[at] = 0;
    }
    return sum;
  }

  void close_groups() {
    const std::size_t size = choice.size() / group_score.size();
    for (std::size_t g = 0; g < group_score.size(); ++g) group_score[g] = score_of(g, size);
    std::fill(open.begin(), open.end(), char{0});
    std::fill(group_open.begin(), group_open.end(), char{1});
    for (std::int64_t i = 0; i < rule.topk_group; ++i) {
      const std::size_t group = best_open(group_score, group_open);
      group_open[group] = 0;
      std::fill_n(open.begin() + static_cast<std::ptrdiff_t>(group * size), size, char{1});
    }
  }

  void choose(const T* scores, const T* bias, std::int32_t* experts) {
    for (std::size_t e = 0; e < choice.size(); ++e) choice[e] = scores[e] + (bias != nullptr ? bias[e] : T(0));
    if (rule.n_group > 1) {
      close_groups();
    } else {
      std::fill(open.begin(), open.end(), char{1});
    }
    for (std::int64_t j = 0; j < rule.top_k; ++j) {
      const std::size_t best = best_open(choice, open);
      open[best] = 0;
      experts[j] = static_cast<std::int32_t>(best);
    }
  }
};

template <class T>
void weights_of_token(const RouterRule& rule, const T* scores, const std::int32_t* experts, T* weights) {
  T sum = static_cast<T>(kNormaliseEps);
  for (std::int64_t j = 0; j < rule.top_k; ++j) sum += scores[experts[j]];
  const T factor = static_cast<T>(rule.factor);
  for (std::int64_t j = 0; j < rule.top_k; ++j) {
    weights[j] = (rule.normalise ? scores[experts[j]] / sum : scores[experts[j]]) * factor;
  }
}

template <class T>
void backward_of_token(const RouterRule& rule, const T* scores, std::int64_t num_experts, const std::int32_t* experts,
                       const T* dweights, const T* dscores, T* dlogits) {
  T sum = static_cast<T>(kNormaliseEps), weighted = 0;
  for (std::int64_t j = 0; j < rule.top_k; ++j) {
    sum += scores[experts[j]];
    weighted += dweights[j] * scores[experts[j]];
  }
  for (std::int64_t e = 0; e < num_experts; ++e) dlogits[e] = dscores != nullptr ? dscores[e] : T(0);
  const T factor = static_cast<T>(rule.factor);
  for (std::int64_t j = 0; j < rule.top_k; ++j) {
    dlogits[experts[j]] += factor * (rule.normalise ? (dweights[j] - weighted / sum) / sum : dweights[j]);
  }
  if (rule.sigmoid) {
    for (std::int64_t e = 0; e < num_experts; ++e) dlogits[e] *= scores[e] * (T(1) - scores[e]);
  } else {
    row_kernels<T>().softmax_backward(scores, dlogits, T(1), num_experts, dlogits);
  }
}

}  // namespace

void router_scores(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& logits,
                   const Tensor& scores) {
  check_rows(name, logits, scores.size(0), scores.size(1));
  run_kernel(ctx, name, elementwise_cost(scores.numel(), 5, 1, 1, scores.dtype()), [&] {
    visit_scores(name, scores, [&]<class T>() {
      for_rows(ctx, scores.size(0), [&](std::int64_t row) {
        const T* in = row_of<T>(logits, row);
        if (rule.sigmoid) {
          row_kernels<T>().sigmoid(in, scores.size(1), row_of<T>(scores, row));
        } else {
          row_kernels<T>().softmax(in, T(1), scores.size(1), scores.size(1), row_of<T>(scores, row));
        }
      });
    });
  });
}

void choose_experts(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                    const Tensor& bias, std::span<std::int32_t> experts) {
  check_experts(name, rule, scores, experts.size());
  const std::int64_t num_experts = scores.size(1), group_size = num_experts / rule.n_group;
  ISOMER_CHECK(rule.n_group >= 1 && num_experts % rule.n_group == 0 && rule.topk_group <= rule.n_group &&
                   (rule.n_group == 1 || rule.group_best <= group_size),
               "{}: {} of {} groups over {} experts", name, rule.topk_group, rule.n_group, num_experts);
  const std::int64_t choosable = rule.n_group > 1 ? rule.topk_group * group_size : num_experts;
  ISOMER_CHECK(rule.top_k <= choosable, "{}: {} experts a token of {}", name, rule.top_k, choosable);
  ISOMER_CHECK(!bias || (bias.numel() == num_experts && bias.dtype() == scores.dtype()), "{}: bias {} {}", name,
               to_string(bias.shape()), name_of(bias.dtype()));
  const double compares = static_cast<double>(rule.top_k + 1);
  run_kernel(ctx, name, elementwise_cost(scores.numel(), compares, 1, 0, scores.dtype()), [&] {
    visit_scores(name, scores, [&]<class T>() {
      std::vector<Chooser<T>> choosers(static_cast<std::size_t>(ctx.threads().num_threads()),
                                       Chooser<T>(rule, num_experts));
      const std::int64_t num_tokens = scores.size(0);
      ctx.threads().parallel_for((num_tokens + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int thread) {
        const std::int64_t end = std::min(num_tokens, (task + 1) * kRowsPerTask);
        for (std::int64_t token = task * kRowsPerTask; token < end; ++token) {
          choosers[static_cast<std::size_t>(thread)].choose(row_of<T>(scores, token), bias ? bias.data<T>() : nullptr,
                                                            experts.data() + token * rule.top_k);
        }
      });
    });
  });
}

void router_weights(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                    std::span<const std::int32_t> experts, const Tensor& weights) {
  check_experts(name, rule, scores, experts.size());
  check_rows(name, weights, scores.size(0), rule.top_k);
  run_kernel(ctx, name, elementwise_cost(weights.numel(), 3, 1, 1, scores.dtype()), [&] {
    visit_scores(name, scores, [&]<class T>() {
      for_rows(ctx, scores.size(0), [&](std::int64_t token) {
        weights_of_token(rule, row_of<T>(scores, token), experts.data() + token * rule.top_k,
                         row_of<T>(weights, token));
      });
    });
  });
}

void router_backward(RankContext& ctx, std::string_view name, const RouterRule& rule, const Tensor& scores,
                     std::span<const std::int32_t> experts, const Tensor& dweights, const Tensor& dscores,
                     const Tensor& dlogits) {
  check_experts(name, rule, scores, experts.size());
  check_rows(name, dweights, scores.size(0), rule.top_k);
  check_rows(name, dlogits, scores.size(0), scores.size(1));
  if (dscores) check_rows(name, dscores, scores.size(0), scores.size(1));
  run_kernel(ctx, name, elementwise_cost(scores.numel(), 6, dscores ? 2 : 1, 1, scores.dtype()), [&] {
    visit_scores(name, scores, [&]<class T>() {
      for_rows(ctx, scores.size(0), [&](std::int64_t token) {
        backward_of_token<T>(rule, row_of<T>(scores, token), scores.size(1), experts.data() + token * rule.top_k,
                             row_of<T>(dweights, token), dscores ? row_of<T>(dscores, token) : nullptr,
                             row_of<T>(dlogits, token));
      });
    });
  });
}

}  // namespace isomer
