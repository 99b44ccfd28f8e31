// Text generation: requests of different lengths, prefilled one after another, then decoded together.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "infer/engine.h"
#include "infer/sampling.h"

namespace isomer {

struct Request {
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
};

/// Collective over the engine's ranks; every rank gets the same tokens. Throws std::invalid_argument before anything
/// runs for an empty prompt, max_new_tokens below 1, a context beyond the model's, a cache too small for all.
Generated generate(RankContext& ctx, Engine& engine, const std::vector<Request>& requests,
                   const GenerateOptions& options = {});

}  // namespace isomer
