#include "layers/reference/attention_block.h"

#include <algorithm>

#include "core/error.h"
#include "layers/reference/gqa_block.h"
#include "layers/reference/mla_block.h"

namespace isomer {

namespace {

/// The entry of `slots` called `name`.
template <class Slots>
const auto& slot_of(const Slots& slots, const std::string& name, const ModelConfig& config) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& slot) { return slot.name == name; });
  if (found == slots.end()) invalid_argument("the attention block of {} has no weight '{}'", config.name, name);
  return *found;
}

AttentionReferenceResult latent_block(const ModelConfig& config, const AttentionReferenceInput& in, int num_threads) {
  const auto slots = mla_reference_weights(config);
  MlaReferenceWeights weights;
  for (const auto& [name, values] : in.weights) weights.*(slot_of(slots, name, config).member) = values;
  MlaReferenceResult result = mla_block_reference(config, weights, in.seq, in.batch, in.first_position, in.x, in.dy,
                                                  num_threads, in.run_length);
  return {std::move(result.y), std::move(result.dx), std::move(result.gradients)};
}

AttentionReferenceResult grouped_block(const ModelConfig& config, const AttentionReferenceInput& in, int num_threads) {
  const auto slots = gqa_reference_weights(config);
  for (const auto& [name, values] : in.weights) slot_of(slots, name, config);
  GqaReferenceResult result = gqa_block_reference(config,
                                                  {.weights = in.weights,
                                                   .seq = in.seq,
                                                   .batch = in.batch,
                                                   .first_position = in.first_position,
                                                   .run_length = in.run_length,
                                                   .x = in.x,
                                                   .dy = in.dy},
                                                  num_threads);
  return {std::move(result.y), std::move(result.dx), std::move(result.gradients)};
}

}  // namespace

AttentionReferenceResult attention_block_reference(const ModelConfig& config, const AttentionReferenceInput& input,
                                                   int num_threads) {
  return config.attention == AttentionKind::mla ? latent_block(config, input, num_threads)
                                                : grouped_block(config, input, num_threads);
}

}  // namespace isomer
