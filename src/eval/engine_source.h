// The inference engine as a source of logits: a sequence's exact rows by prefill, the others by one decode step of
// several tokens, which is the loop of single ones.
#pragma once

#include "eval/scored_rows.h"
#include "infer/engine.h"

namespace isomer {

class EngineSource : public LogitSource {
 public:
  /// Collective over the world, as are its calls. `options.cache_tokens` has room for one window. Throws as Engine
  /// does.
  EngineSource(RankContext& ctx, EngineOptions options, const ModelWeights& weights)
      : engine_(ctx, std::move(options), weights) {}

  Tensor logits(RankContext& ctx, std::span<const ScoredSequence> sequences) override;

 private:
  Engine engine_;
};

/// Exact prefill on rank 0 alone; the other ranks get no logits.
class PrefillSource : public LogitSource {
 public:
  /// Collective over the world; calls are not. A model of any kind.
  PrefillSource(RankContext& ctx, const ModelConfig& config, const ModelWeights& weights, std::int64_t window);

  Tensor logits(RankContext& ctx, std::span<const ScoredSequence> sequences) override;

 private:
  std::unique_ptr<Communicator> alone_;
  std::optional<Engine> engine_;
};

/// Room for a window of one sequence.
std::int64_t window_cache_tokens(std::int64_t window, const DecodeLayout& layout, std::int64_t page_tokens);

}  // namespace isomer
