// Short trainings of one small mixture-of-experts model, for claims about training: the same data, seed and schedule
// under any layout, with routing that is recorded or replayed token by token.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "train/trainer.h"

namespace isomer {

/// Routing of a whole run by token, so that runs on other ranks can be compared and replayed: of step s and layer l the
/// experts [seq·batch, top_k], best first, row = position·batch + sequence. Dense layers are empty.
class RoutingHistory {
 public:
  RoutingHistory() = default;
  RoutingHistory(std::int64_t num_steps, std::int64_t num_layers);
  std::vector<std::int32_t>& at(std::int64_t step, std::int64_t layer);
  const std::vector<std::int32_t>& at(std::int64_t step, std::int64_t layer) const;
  std::int64_t num_steps() const { return num_steps_; }
  std::int64_t num_layers() const { return num_layers_; }

 private:
  std::int64_t num_steps_ = 0, num_layers_ = 0;
  std::vector<std::vector<std::int32_t>> experts_;
};

/// Tokens whose set of experts is not the same in both, at one step and layer. Throws a check's failure for traces of
/// other shapes.
std::int64_t count_flips(const RoutingHistory& a, const RoutingHistory& b, std::int64_t step, std::int64_t layer,
                         std::int64_t top_k);

struct StudyRun {
  std::string layout = "explicit";
  int ranks = 1;
  std::uint64_t seed = 1;
  const RoutingHistory* replay = nullptr;  // of another run on the same tokens
  bool moves_one_weight = false;           // by one ulp, at the beginning
};

struct StudyResult {
  std::vector<double> losses;  // by step, nats a token
  std::vector<float> weights;  // float32 master weights at the end, flat
  RoutingHistory routing;
  double seconds = 0;  // wall
};

/// The novel that the executable carries, by a tokenizer trained on it, and the model: hidden 64, 8 heads, 3 layers,
/// the last two with 8 experts, two a token (V3's router). `quick` has few steps and short sequences.
class TrainingStudy {
 public:
  TrainingStudy(bool quick, std::uint64_t seed);
  StudyResult run(const StudyRun& run) const;
  const TrainSettings& settings() const { return settings_; }
  const ModelConfig& config() const { return config_; }
  /// Layers that route.
  std::vector<std::int64_t> routed_layers() const;

 private:
  TrainSettings settings_;
  ModelConfig config_;
  std::shared_ptr<const TokenDataset> tokens_;
};

/// How two runs of equally many steps part.
struct Parting {
  std::int64_t first_step = 0;  // from 1, whose loss differs in any bit; 0: none
  double largest = 0;           // |loss difference|
  double at_end = 0;            // |difference of the means over the last tenth of the steps|
  double weights_largest = 0;   // |difference| of any weight at the end
  bool identical = false;       // losses and weights, bit for bit
};
Parting parting_of(const StudyResult& a, const StudyResult& b);
/// Mean loss over the last tenth of the steps.
double end_loss(const std::vector<double>& losses);

}  // namespace isomer
