// Text generation: requests of different lengths, prefilled one after another, then decoded together.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "infer/engine.h"
#include "infer/sampling.h"

namespace isomer {

struct TextRequest {
  std::vector<std::int32_t> prompt;  // at least one token
  std::int64_t max_new_tokens = 0;   // at least 1
  Sampling sampling;
};

struct GenerateOptions {
  std::optional<std::int32_t> eos;  // ends a request; it is not part of the result
  /// Called on every rank with each new token, as soon as it is known.
  std::function<void(std::size_t request, std::int32_t token)> on_token = {};
};

struct Generated {
  std::vector<std::vector<std::int32_t>> tokens;  // a request
  std::int64_t prompt_tokens = 0;
  std::int64_t decoded_tokens = 0;  // by decode steps; the first token of a request comes from its prefill
  std::int64_t decode_steps = 0;
  double prefill_s = 0, decode_s = 0;  // wall time
  std::int64_t cache_bytes = 0;        // of this rank
};

/// Throws std::invalid_argument for an empty prompt, max_new_tokens below 1, sampling that makes no sense, a context
/// beyond the model's, a cache too small for all requests together, fewer requests than ranks that each have their own.
void check_requests(const EngineOptions& options, const std::vector<TextRequest>& requests);

/// Collective over the engine's ranks; every rank gets the same tokens. Throws as check_requests does before
/// anything runs, and where sequences that stand in the cache leave too little room.
Generated generate(RankContext& ctx, Engine& engine, const std::vector<TextRequest>& requests,
                   const GenerateOptions& options = {});

/// Prefill and decode on engines of their own, under layouts of their own, the cache handed over after each prompt
/// (hand_over.h). Decode has ranks 0 … of the world; prefill has the ranks behind them, or, where not `apart`, the same
/// ones.
struct SeparatedOptions {
  EngineOptions prefill, decode;  // cache_tokens of prefill: 0 for room for the longest prompt
  bool apart = true;

  int num_ranks() const;
};
/// Collective over the world. Ranks of the decode layout get the result, others one without tokens. Throws as
/// check_requests does, and for groups that can't be served (why_hand_over_unfit), named in the error.
Generated generate_separated(RankContext& ctx, SeparatedOptions options, const ModelWeights& weights,
                             const std::vector<TextRequest>& requests, const GenerateOptions& generate_options = {});

}  // namespace isomer
