// A checkpoint under a decode layout, as the evaluations that score decode take it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eval/decode_scores.h"
#include "infer/engine.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/tpla.h"

namespace isomer {

/// Whether a layout is one of decode, which --mode speaks of, rather than of training.
bool is_decode_layout(const std::string& layout);
/// What --layout may be here.
std::string decode_layout_list();

/// A model that a decode layout computes. It must outlive the sources that it makes.
class EvaluatedModel {
 public:
  /// `directory` has config.json and weights, and for tpla the side file; `name` is what the user called it. Throws
  /// std::invalid_argument for a layout that doesn't fit, isomer::Error for files that are wrong.
  EvaluatedModel(std::string name, const std::string& directory, const std::string& layout, DType dtype = DType::f32);

  const ModelConfig& config() const { return config_; }
  /// Of the layout, options filled in.
  const std::string& layout() const { return layout_; }
  int num_ranks() const { return one_rank_ ? 1 : engine_.layout.devices(); }
  /// False where the layout computes another function than the model.
  bool exact() const { return exact_; }
  /// What stands above a table: the layout, what a rank caches, and that it is not exact where it is not.
  std::string description() const;
  /// For windows of at most `window` tokens.
  std::unique_ptr<LogitSource> source(RankContext& ctx, std::int64_t window) const;

 private:
  std::optional<LatentSharding> one_rank_form(const std::string& asked, bool whole_softmax, DType dtype) const;

  std::string name_, layout_;
  ModelConfig config_;
  ModelWeights weights_;
  EngineOptions engine_;
  // Where one rank computes all shards in turn: tpla:softmax=whole, which no rank of the engine runs, and heads that
  // the layout's ranks can't share out.
  std::optional<LatentSharding> one_rank_;
  bool exact_ = false;
};

/// A base model: exact prefill on one rank. It must outlive the sources that it makes.
class BaseModel {
 public:
  BaseModel(const std::string& directory, DType dtype = DType::f32);
  const ModelConfig& config() const { return config_; }
  std::unique_ptr<LogitSource> source(RankContext& ctx, std::int64_t window) const;

 private:
  ModelConfig config_;
  ModelWeights weights_;
};

/// The convention that the windows of a decode evaluation follow, for people.
std::string convention_text(const WindowOrder& windows, ScoreMode mode);

}  // namespace isomer
