// Where a block's weights and embeddings come from: a checkpoint where the model is a directory that has one, seeded
// values otherwise.
#pragma once

#include <memory>
#include <string>

#include "study/block_run.h"

namespace isomer {

class Checkpoint;

struct WeightsSource {
  std::shared_ptr<const Checkpoint> checkpoint;  // null: seeded
  std::int64_t layer = 0;
  std::string description;  // for reports
};

/// `model` as given by the user: a built-in name or a path. Throws for a layer that the model does not have.
WeightsSource open_weights(const std::string& model, const ModelConfig& config, std::int64_t layer);

/// Weights, embedded bytes of `text` (a checkpoint's rows, or seeded ones) and a seeded output gradient.
BlockData load_block_data(const BlockProblem& problem, const WeightsSource& source, const std::string& text,
                          std::uint64_t seed, bool shape_only);

}  // namespace isomer
