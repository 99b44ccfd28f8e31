// Decode layouts and prefills of latent attention in time, two ranks of one thread each: for T5, T6 and B2. Seeded
// weights and cached rows: a time does not depend on what they are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/config.h"
#include "model/model_weights.h"
#include "parallel/decode/step_scheme.h"

namespace isomer {

/// `layers` layers of a built-in model with nothing in them but attention: a FFN and a vocabulary of hardly any size.
ModelConfig attention_model(const std::string& name, std::int64_t layers);
/// The side file of a conversion that changes nothing but the cut: g shards, κ 1.
std::shared_ptr<const TplaModel> plain_tpla(const ModelConfig& config, int shards);

/// `batch` sequences decode a token each after `context` cached ones, bfloat16.
struct LayoutTimeCase {
  std::string model;   // a built-in one's name
  std::string layout;  // of two ranks
  std::int64_t context = 0, batch = 1;
};

struct LayoutTime {
  LayoutTimeCase of;
  bool virtual_clock = false;
  double seconds = 0;            // of a step, the median of several, the slowest rank's
  double attention_seconds = 0;  // of that in kernels of the attention core
  double cache_elements = 0;     // a token, layer and rank
  double bytes_sent = 0;         // a step, by the rank that sends most

  double per_token() const { return seconds / static_cast<double>(of.batch); }
};

/// `config` and `weights` are those of c.model.
LayoutTime time_layout(const ModelConfig& config, const ModelWeights& weights, const LayoutTimeCase& c,
                       std::int64_t steps, std::uint64_t seed);

/// A prompt read by two ranks under tpla:g=2: by exact prefill, and every position as decode computes it.
struct PrefillTime {
  std::string model;
  std::int64_t tokens = 0;
  bool virtual_clock = false;
  double exact_seconds = 0, sliced_seconds = 0;  // medians, of the slowest rank
  double exact_flops = 0, sliced_flops = 0;      // counted, of the rank that computes most
};
PrefillTime time_prefills(const ModelConfig& config, const ModelWeights& weights, const std::string& model,
                          std::int64_t tokens, int repetitions);

nlohmann::json to_json(const LayoutTime& time);
nlohmann::json to_json(const PrefillTime& time);
std::vector<LayoutTime> layout_times_from(const nlohmann::json& list);
std::vector<PrefillTime> prefill_times_from(const nlohmann::json& list);
/// The time of a case; throws isomer::Error naming the case if it was not recorded.
const LayoutTime& find_time(const std::vector<LayoutTime>& times, const LayoutTimeCase& c);

}  // namespace isomer
