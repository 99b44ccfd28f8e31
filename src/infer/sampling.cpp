#include "infer/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace isomer {

namespace {

/// Uniform in [0, 1) by (seed, draw) alone: splitmix64, twice.
double uniform(std::uint64_t seed, std::int64_t draw) {
  std::uint64_t x = seed;
  for (const std::uint64_t step : {std::uint64_t{0}, static_cast<std::uint64_t>(draw)}) {
    x += 0x9e3779b97f4a7c15u * (step + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

}  // namespace

void check_sampling(const Sampling& s) {
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature)) {
    invalid_argument("temperature is {}, must be 0 (greedy) or more", s.temperature);
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) invalid_argument("top_p is {}, must be above 0 and at most 1", s.top_p);
}

std::vector<double> logits_of_row(const Tensor& logits, std::int64_t row) {
  std::vector<double> values(static_cast<std::size_t>(logits.size(1)));
  visit_dtype(logits.dtype(), [&]<class T>() {
    const T* from = logits.data<T>() + row * logits.stride(0);
    std::transform(from, from + values.size(), values.begin(), [](T x) { return static_cast<double>(x); });
  });
  return values;
}

std::int32_t sample_token(std::span<const double> logits, const Sampling& sampling, std::int64_t draw) {
  if (!std::all_of(logits.begin(), logits.end(), [](double x) { return std::isfinite(x); })) {
    throw Error("a logit is not finite: the weights, or the precision, don't carry this text");
  }
  const auto best = std::max_element(logits.begin(), logits.end());
  if (sampling.temperature == 0) return static_cast<std::int32_t>(best - logits.begin());
  std::vector<double> p(logits.size());
  std::transform(logits.begin(), logits.end(), p.begin(),
                 [&](double x) { return std::exp((x - *best) / sampling.temperature); });
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  std::vector<std::int32_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return p[static_cast<std::size_t>(a)] > p[static_cast<std::size_t>(b)];
  });
  double kept = 0;
  std::size_t count = 0;
  while (count < order.size() && kept < sampling.top_p * total) kept += p[static_cast<std::size_t>(order[count++])];
  double left = uniform(sampling.seed, draw) * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    left -= p[static_cast<std::size_t>(order[i])];
    if (left < 0) return order[i];
  }
  return order[count - 1];
}

}  // namespace isomer
