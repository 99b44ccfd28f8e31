#include "eval/decode_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace isomer {

namespace {

void check_problem(const ModelConfig& config, const WindowOrder& windows, const ScoringOptions& options) {
  check_windows_fit(config, windows);
  if (options.mode == ScoreMode::decode && windows.overlap() == 0) {
    invalid_argument(
        "--mode decode --overlap 0: decode needs a prefix that exact prefill computes; give at least 1, "
        "or take --mode every-position");
  }
  if (options.batch < 1) invalid_argument("--batch {}: at least 1 window", options.batch);
}

/// Calls `rows` with the sequences of every batch of windows that has any, in order.
void for_batches(RankContext& ctx, const WindowOrder& windows, const ScoringOptions& options,
                 const std::function<void(std::span<const ScoredSequence>)>& rows) {
  for (std::int64_t first = 0; first < windows.num_windows(); first += options.batch) {
    if (ctx.rank() == 0 && options.progress) options.progress(first, windows.num_windows());
    std::vector<ScoredSequence> sequences;
    for (std::int64_t j = first; j < std::min(first + options.batch, windows.num_windows()); ++j) {
      for (ScoredSequence& s : scored_sequences(windows, j, options.mode)) sequences.push_back(std::move(s));
    }
    ctx.ledger().clear();
    ctx.ops().clear();
    if (!sequences.empty()) rows(sequences);
  }
}

std::span<const float> row_of(const Tensor& logits, std::int64_t row) {
  return {logits.data<float>() + row * logits.stride(0), static_cast<std::size_t>(logits.size(1))};
}

/// Calls `token` with the row and the target of every scored row.
template <class Fn>
void for_targets(std::span<const ScoredSequence> sequences, Fn&& token) {
  std::int64_t row = 0;
  for (const ScoredSequence& s : sequences) {
    for (const std::int32_t target : s.targets) {
      if (target >= 0) token(row, target);
      ++row;
    }
  }
}

double log_sum_exp(std::span<const float> z) {
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const float value : z) sum += std::exp(static_cast<double>(value) - largest);
  return largest + std::log(sum);
}

std::ptrdiff_t argmax(std::span<const float> z) { return std::max_element(z.begin(), z.end()) - z.begin(); }

/// Standard error of the mean of values, from the means of whole blocks.
double block_error(const std::vector<double>& values) {
  const std::int64_t blocks = std::ssize(values) / kErrorBlock;
  if (blocks < 2) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> means(static_cast<std::size_t>(blocks), 0);
  double mean = 0, squares = 0;
  for (std::int64_t i = 0; i < blocks * kErrorBlock; ++i) {
    means[static_cast<std::size_t>(i / kErrorBlock)] += values[static_cast<std::size_t>(i)] / kErrorBlock;
  }
  for (const double value : means) mean += value / static_cast<double>(blocks);
  for (const double value : means) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(blocks - 1) / static_cast<double>(blocks));
}

/// Whether this process has the sums.
bool is_root(const GroupOptions& group) { return group.backend == Backend::threads || mpi_world().rank == 0; }

[[noreturn]] void nothing_to_score(const WindowOrder& windows) {
  invalid_argument(
      "no token to score: a window's first {} tokens are context only; give more text, a larger --limit, or less "
      "--overlap",
      windows.overlap());
}

}  // namespace

Perplexity score_windows(const ModelConfig& config, const WindowOrder& windows, const ScoringOptions& options,
                         const LogitSourceFactory& source) {
  check_problem(config, windows, options);
  Perplexity sum{.num_windows = windows.num_windows()};
  run_group(options.group, [&](RankContext& ctx) {
    const std::unique_ptr<LogitSource> model = source(ctx);
    for_batches(ctx, windows, options, [&](std::span<const ScoredSequence> sequences) {
      const Tensor logits = model->logits(ctx, sequences);
      if (ctx.rank() != 0) return;
      for_targets(sequences, [&](std::int64_t row, std::int32_t target) {
        const std::span<const float> z = row_of(logits, row);
        sum.nats += log_sum_exp(z) - static_cast<double>(z[static_cast<std::size_t>(target)]);
        ++sum.num_tokens;
        if (!options.bytes_of_token.empty()) {
          sum.num_bytes += options.bytes_of_token.at(static_cast<std::size_t>(target));
        }
      });
    });
  });
  if (is_root(options.group) && sum.num_tokens == 0) nothing_to_score(windows);
  return sum;
}

double Divergence::percentile(double percent) const {
  ISOMER_CHECK(percent > 0 && percent <= 100 && !kl.empty(), "{} % of {} values", percent, kl.size());
  // 99.9 % of 1000 is 999, whatever 99.9 is in binary.
  const auto rank = static_cast<std::size_t>(std::ceil(percent * static_cast<double>(kl.size()) / 100 - 1e-9));
  return kl[std::clamp<std::size_t>(rank, 1, kl.size()) - 1];
}

void DivergenceMeter::add(std::span<const float> base, std::span<const float> model, std::int32_t target) {
  if (base.size() != model.size()) {
    invalid_argument("the base has a vocabulary of {} tokens, the model of {}: they can't be compared", base.size(),
                     model.size());
  }
  const double lse_base = log_sum_exp(base), lse_model = log_sum_exp(model);
  double kl = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const double log_p = static_cast<double>(base[i]) - lse_base, log_q = static_cast<double>(model[i]) - lse_model;
    kl += std::exp(log_p) * (log_p - log_q);
  }
  kl_.push_back(std::max(kl, 0.0));  // a rounding below zero is none
  top1_agreements_ += argmax(base) == argmax(model) ? 1 : 0;
  const auto at = static_cast<std::size_t>(target);
  const double log_p = static_cast<double>(base[at]) - lse_base, log_q = static_cast<double>(model[at]) - lse_model;
  const double change = std::exp(log_q) - std::exp(log_p);
  change_ += change;
  square_change_ += change * change;
  nats_difference_.push_back(log_p - log_q);
  nats_base_ -= log_p;
  nats_model_ -= log_q;
}

Divergence DivergenceMeter::result() const {
  Divergence d{.num_tokens = std::ssize(kl_), .kl = kl_};
  const double count = static_cast<double>(std::max<std::int64_t>(d.num_tokens, 1));
  for (const double value : kl_) d.mean_kl += value / count;
  std::sort(d.kl.begin(), d.kl.end());
  d.kl_error = block_error(kl_);
  d.nats_difference_error = block_error(nats_difference_);
  d.top1_agreements = top1_agreements_;
  d.mean_change = change_ / count;
  d.root_mean_square_change = std::sqrt(square_change_ / count);
  d.nats_base = nats_base_;
  d.nats_model = nats_model_;
  return d;
}

Divergence measure_divergence(const ModelConfig& config, const WindowOrder& windows, const ScoringOptions& options,
                              const LogitSourceFactory& base, const LogitSourceFactory& model) {
  check_problem(config, windows, options);
  DivergenceMeter meter;
  run_group(options.group, [&](RankContext& ctx) {
    const std::unique_ptr<LogitSource> first = base(ctx), second = model(ctx);
    for_batches(ctx, windows, options, [&](std::span<const ScoredSequence> sequences) {
      std::vector<ScoredSequence> exact(sequences.begin(), sequences.end());
      for (ScoredSequence& s : exact) s.exact_rows = std::ssize(s.ids);
      const Tensor p = first->logits(ctx, exact), q = second->logits(ctx, sequences);
      if (ctx.rank() != 0) return;
      for_targets(sequences,
                  [&](std::int64_t row, std::int32_t target) { meter.add(row_of(p, row), row_of(q, row), target); });
    });
  });
  Divergence result = meter.result();
  if (is_root(options.group) && result.num_tokens == 0) nothing_to_score(windows);
  return result;
}

}  // namespace isomer
