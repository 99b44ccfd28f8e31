// Perplexity of a language model on held-out text, in whole windows forward (prefill; no cache).
//
// The text is one sequence of tokens; window j reads tokens [j·stride, j·stride + window), stride = window − overlap,
// and predicts the token after each. A window scores only targets that no earlier one scored: all of the first window,
// the last `stride` of the others, for which its first `overlap` tokens are context. Tokens attend within their
// document; a document's first token is not predicted. So every other token is scored exactly once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "layers/attention_core.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "train/batches.h"
#include "train/token_file.h"

namespace isomer {

/// The windows over a text. Pure: sample(j) depends on nothing but the arguments.
class WindowOrder {
 public:
  /// Looks at the first `limit` tokens after the first one as targets (0: at all). Throws std::invalid_argument for a
  /// window < 1, an overlap outside [0, window), fewer than two tokens.
  WindowOrder(TokenDataset dataset, std::int64_t window, std::int64_t overlap, std::int64_t limit = 0);

  std::int64_t window() const { return window_; }
  std::int64_t overlap() const { return overlap_; }
  std::int64_t num_windows() const { return num_windows_; }
  const TokenDataset& dataset() const { return dataset_; }
  /// Targets −1 where window j scores nothing: context, a document's first token, padding behind the end.
  Sample sample(std::int64_t j) const;

 private:
  TokenDataset dataset_;
  std::int64_t window_, overlap_, num_targets_, num_windows_;
};

/// Throws std::invalid_argument for windows beyond the model's positions, or tokens beyond its vocabulary.
void check_windows_fit(const ModelConfig& config, const WindowOrder& windows);

struct PerplexityOptions {
  std::string layout = "explicit";
  DType dtype = DType::f32;
  AttentionCore core = AttentionCore::fused;
  std::int64_t batch = 1;  // windows a forward
  GroupOptions group;      // threads of this process; num_ranks as the layout says
  /// Bytes of text that each token id stands for; what bits per byte divide by. Empty: unknown.
  std::vector<std::int32_t> bytes_of_token;
  /// Called with windows done and windows in all, at rank 0.
  std::function<void(std::int64_t, std::int64_t)> progress = {};
};

struct Perplexity {
  std::int64_t num_windows = 0;
  std::int64_t num_tokens = 0;  // scored
  std::int64_t num_bytes = 0;   // of text behind them; 0: unknown
  double nats = 0;              // Σ −ln p over the scored tokens
  double nats_per_token() const { return nats / static_cast<double>(num_tokens); }
  double per_token() const;      // e^(nats per token)
  double bits_per_byte() const;  // of the text; NaN where its bytes are unknown
};

/// Throws std::invalid_argument for a layout that doesn't fit, a window beyond max_position_embeddings, a vocabulary
/// larger than the model's, and a text without a token to score. Sums in float64 by rank, in the order of windows.
Perplexity measure_perplexity(const ModelConfig& config, const ModelWeights& weights, const WindowOrder& windows,
                              const PerplexityOptions& options);

}  // namespace isomer
