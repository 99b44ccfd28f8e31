// What tools/tpla_study.py recorded of one model, for the claims that are judged by it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "study/claims.h"

namespace isomer {

/// How a checkpoint was converted; the defaults are the study's.
struct TplaChoice {
  std::string transform = "pca";
  int shards = 2;
  std::int64_t shared_columns = 0;
  std::string rms = "exact", kappa = "one";
  std::string text = "calibrate";  // or "other"
  std::int64_t tokens = 16384;
  int seed = 1;
  std::int64_t align = 0;  // steps
};

class TplaRecording {
 public:
  /// The recording docs/data/NAME.json that this build carries; empty() where there is none. Throws isomer::Error for
  /// one that can't be read.
  explicit TplaRecording(const std::string& name);

  bool empty() const { return recorded_.is_null(); }
  bool has(const TplaChoice& choice) const { return find(choice) != nullptr; }
  /// What `isomer convert tpla` recorded of it. Throws isomer::Error where it is missing.
  const nlohmann::json& run(const TplaChoice& choice) const;
  bool has(const TplaChoice& choice, const std::string& layout, const std::string& mode) const;
  /// What `isomer eval kl` recorded of it under a layout as it was asked for and a mode.
  const nlohmann::json& evaluation(const TplaChoice& choice, const std::string& layout, const std::string& mode) const;
  std::int64_t model(const char* key) const { return recorded_.at("model").at(key).get<std::int64_t>(); }
  /// Model, machine and command, for evidence.
  std::string origin() const;

 private:
  const nlohmann::json* find(const TplaChoice& choice) const;
  const nlohmann::json* find(const TplaChoice& choice, const std::string& layout, const std::string& mode) const;

  std::string name_;
  nlohmann::json recorded_;
};

/// Mean KL of an evaluation, and how far it may be off: two standard errors.
struct MeasuredKl {
  double mean = 0, margin = 0;
};
MeasuredKl kl_of(const nlohmann::json& evaluation);
/// The same of the nats a token that the model needs beyond the base.
MeasuredKl nats_over_base(const nlohmann::json& evaluation);
/// Whether a is smaller beyond the margins of both.
bool clearly_less(const MeasuredKl& a, const MeasuredKl& b);
Cell kl_cell(const MeasuredKl& kl);
/// e^(nats per token).
double perplexity_of(const nlohmann::json& evaluation);

}  // namespace isomer
