// A checkpoint under a decode layout, as the evaluations that score decode take it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eval/decode_scores.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/tpla.h"
#include "sharding/layout.h"

namespace isomer {

/// Whether a layout is one of decode, which --mode speaks of, rather than of training.
bool is_decode_layout(const Layout& layout);
/// What --layout may be here.
std::string decode_layout_list();

/// A model that a decode layout computes. It must outlive the sources that it makes.
class EvaluatedModel {
 public:
  /// `directory` has config.json and weights, and for tpla the side file; `name` is what the user called it. Throws
  /// std::invalid_argument for a layout that doesn't fit, isomer::Error for files that are wrong.
  EvaluatedModel(std::string name, const std::string& directory, const Layout& layout);

  const ModelConfig& config() const { return config_; }
  /// Of the layout, options filled in.
  const std::string& layout() const { return layout_; }
  int num_ranks() const { return 1; }
  /// False where the layout computes another function than the model.
  bool exact() const { return exact_; }
  /// What stands above a table: the layout, what a rank caches, and that it is not exact where it is not.
  std::string description() const;
  std::unique_ptr<LogitSource> source(RankContext& ctx) const;
  /// The same model by exact prefill, whatever the mode.
  std::unique_ptr<LogitSource> exact_source(RankContext& ctx) const;

 private:
  std::string name_, layout_;
  ModelConfig config_;
  ModelWeights weights_;
  LatentSharding sharding_ = LatentSharding::tpla;
  TplaOptions options_;
  std::vector<TplaLayer> scalars_;
  bool exact_ = false;
};

/// The convention that the windows of a decode evaluation follow, for people.
std::string convention_text(const WindowOrder& windows, ScoreMode mode);

}  // namespace isomer
