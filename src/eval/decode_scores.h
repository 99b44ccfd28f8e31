// Perplexity of one way of computing, and the divergence of one from another, over the rows that a ScoreMode scores.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/group.h"
#include "eval/perplexity.h"
#include "eval/scored_rows.h"

namespace isomer {

/// Makes a rank's LogitSource. Called once on every rank.
using LogitSourceFactory = std::function<std::unique_ptr<LogitSource>(RankContext&)>;

struct ScoringOptions {
  ScoreMode mode = ScoreMode::decode;
  std::int64_t batch = 1;  // windows at once
  GroupOptions group;      // as many ranks as the sources need; of processes, the first has the result
  /// Bytes of text that each token id stands for. Empty: unknown.
  std::vector<std::int32_t> bytes_of_token;
  /// Called with windows done and windows in all, at rank 0.
  std::function<void(std::int64_t, std::int64_t)> progress = {};
};

/// Throws std::invalid_argument for windows that don't fit the configuration (as measure_perplexity does), for decode
/// without an overlap, and for a text without a token to score.
Perplexity score_windows(const ModelConfig& config, const WindowOrder& windows, const ScoringOptions& options,
                         const LogitSourceFactory& source);

/// p the base's next-token distribution, q the model's.
struct Divergence {
  std::int64_t num_tokens = 0;
  std::vector<double> kl;  // KL(p ‖ q) in nats of every scored token, ascending
  double mean_kl = 0;
  std::int64_t top1_agreements = 0;                     // both have the same most probable token
  double mean_change = 0, root_mean_square_change = 0;  // of the true token's probability, q − p
  // Standard errors of the means from the means of blocks of kErrorBlock tokens in the order of the text, whose tokens
  // are not independent; NaN with fewer than two blocks.
  double kl_error = 0, nats_difference_error = 0;  // of mean_kl and of (nats_model − nats_base)/num_tokens
  double nats_base = 0, nats_model = 0;            // Σ −ln of the true token's probability
  /// The smallest entry of `kl` that at least `percent` % of the entries don't exceed.
  double percentile(double percent) const;
};

inline constexpr std::int64_t kErrorBlock = 256;

/// The base is always computed by exact prefill, from `base`; the model in options.mode, from `model`. Throws as
/// score_windows does, and for sources of different vocabularies.
Divergence measure_divergence(const ModelConfig& config, const WindowOrder& windows, const ScoringOptions& options,
                              const LogitSourceFactory& base, const LogitSourceFactory& model);

/// Sums up rows one by one; what measure_divergence does with them.
class DivergenceMeter {
 public:
  /// `base`, `model`: logits of one row. Throws std::invalid_argument if their lengths differ.
  void add(std::span<const float> base, std::span<const float> model, std::int32_t target);
  Divergence result() const;

 private:
  std::vector<double> kl_, nats_difference_;
  std::int64_t top1_agreements_ = 0;
  double change_ = 0, square_change_ = 0, nats_base_ = 0, nats_model_ = 0;
};

}  // namespace isomer
