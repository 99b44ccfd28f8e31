#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "comm/communicator.h"
#include "sharding/sequence_layout.h"
#include "train/language_model.h"

namespace isomer {

WindowOrder::WindowOrder(TokenDataset dataset, std::int64_t window, std::int64_t overlap, std::int64_t limit)
    : dataset_(std::move(dataset)), window_(window), overlap_(overlap) {
  if (window < 1) invalid_argument("--window {}: at least 1 token", window);
  if (overlap < 0 || overlap >= window) {
    invalid_argument("--overlap {}: from 0 to {}, less than the window of {}", overlap, window - 1, window);
  }
  if (limit < 0) invalid_argument("--limit {}: at least 1 token, or 0 for all", limit);
  num_targets_ = dataset_.num_tokens() - 1;
  if (num_targets_ < 1) {
    invalid_argument("{} tokens of text: a perplexity takes at least 2; give more", dataset_.num_tokens());
  }
  if (limit > 0) num_targets_ = std::min(num_targets_, limit);
  const std::int64_t stride = window - overlap, rest = std::max<std::int64_t>(0, num_targets_ - window);
  num_windows_ = 1 + (rest + stride - 1) / stride;
}

Sample WindowOrder::sample(std::int64_t j) const {
  const std::int64_t begin = j * (window_ - overlap_), length = std::min(window_, num_targets_ - begin);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(length) + 1);
  dataset_.read(begin, tokens);
  const auto size = static_cast<std::size_t>(window_);
  Sample sample{std::vector<std::int32_t>(size, 0), std::vector<std::int32_t>(size, -1),
                std::vector<std::int32_t>(size, 0), std::vector<std::int32_t>(size, 0)};
  std::int64_t document = dataset_.document_of(begin);
  std::int64_t document_end = dataset_.document_begin(document + 1);
  std::int32_t segment = 0;
  for (std::int64_t i = 0; i < window_; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (i < length && begin + i == document_end) {
      ++segment;
      document_end = dataset_.document_begin(++document + 1);
    }
    sample.segments[at] = i < length ? segment : segment + 1;
    sample.positions[at] = static_cast<std::int32_t>(i);
    if (i >= length) continue;
    sample.ids[at] = tokens[at];
    const bool is_context = j > 0 && i < overlap_;
    if (!is_context && begin + i + 1 < document_end) sample.targets[at] = tokens[at + 1];
  }
  return sample;
}

void check_windows_fit(const ModelConfig& config, const WindowOrder& windows) {
  if (config.max_position_embeddings > 0 && windows.window() > config.max_position_embeddings) {
    invalid_argument("--window {}: {} has max_position_embeddings {}; read shorter windows", windows.window(),
                     config.name, config.max_position_embeddings);
  }
  if (windows.dataset().vocab_size() > config.vocab_size) {
    invalid_argument("the text's tokenizer has {} tokens, {} has a vocabulary of {}: they don't belong together",
                     windows.dataset().vocab_size(), config.name, config.vocab_size);
  }
}

double Perplexity::per_token() const { return std::exp(nats_per_token()); }

double Perplexity::bits_per_byte() const {
  if (num_bytes == 0) return std::numeric_limits<double>::quiet_NaN();
  return nats / std::numbers::ln2 / static_cast<double>(num_bytes);
}

namespace {

void check_problem(const ModelConfig& config, const WindowOrder& windows, const PerplexityOptions& options) {
  check_windows_fit(config, windows);
  if (options.batch < 1) invalid_argument("--batch {}: at least 1 window", options.batch);
  if (options.group.backend != Backend::threads) invalid_argument("a perplexity is measured on threads only");
}

/// The samples of one forward; past the end, windows that score nothing.
std::vector<Sample> samples_of(const WindowOrder& windows, std::int64_t first, std::int64_t batch) {
  std::vector<Sample> samples;
  for (std::int64_t i = first; i < first + batch; ++i) {
    samples.push_back(windows.sample(std::min(i, windows.num_windows() - 1)));
    if (i >= windows.num_windows()) std::fill(samples.back().targets.begin(), samples.back().targets.end(), -1);
  }
  return samples;
}

void count_targets(const std::vector<Sample>& samples, const std::vector<std::int32_t>& bytes_of_token,
                   Perplexity& sum) {
  for (const Sample& sample : samples) {
    for (const std::int32_t target : sample.targets) {
      if (target < 0) continue;
      ++sum.num_tokens;
      if (!bytes_of_token.empty()) sum.num_bytes += bytes_of_token.at(static_cast<std::size_t>(target));
    }
  }
}

/// A rank's part: losses of its rows, counts of its sequences' targets where it is their first rank.
Perplexity measure_rank(RankContext& ctx, const ModelConfig& config, const ModelWeights& weights,
                        const WindowOrder& windows, const PerplexityOptions& options) {
  LanguageModel model(ctx, {.config = config,
                            .layout = parse_layout(options.layout),
                            .dtype = options.dtype,
                            .core = options.core,
                            .seq = windows.window(),
                            .batch = options.batch});
  const SequenceGroups& groups = model.groups();
  Perplexity part;
  const std::int64_t step = options.batch * groups.data_size;
  for (std::int64_t first = groups.data_rank * options.batch; first < windows.num_windows(); first += step) {
    ctx.ledger().clear();
    ctx.ops().clear();
    const std::vector<Sample> samples = samples_of(windows, first, options.batch);
    for (const double loss : model.token_losses(ctx, weights, samples)) part.nats += loss;
    if (groups.sequence->rank() == 0) count_targets(samples, options.bytes_of_token, part);
    if (ctx.rank() == 0 && options.progress) options.progress(first, windows.num_windows());
  }
  return part;
}

}  // namespace

Perplexity measure_perplexity(const ModelConfig& config, const ModelWeights& weights, const WindowOrder& windows,
                              const PerplexityOptions& options) {
  check_problem(config, windows, options);
  std::vector<Perplexity> parts(static_cast<std::size_t>(options.group.num_ranks));
  run_group(options.group, [&](RankContext& ctx) {
    parts[static_cast<std::size_t>(ctx.rank())] = measure_rank(ctx, config, weights, windows, options);
  });
  Perplexity sum{.num_windows = windows.num_windows()};
  for (const Perplexity& part : parts) {
    sum.nats += part.nats;
    sum.num_tokens += part.num_tokens;
    sum.num_bytes += part.num_bytes;
  }
  if (sum.num_tokens == 0) invalid_argument("no token of the text has one before it in its document; give more text");
  return sum;
}

}  // namespace isomer
