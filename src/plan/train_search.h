// The search over training layouts, and what `isomer plan train` says.
#pragma once

#include <array>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plan/train_step.h"

namespace isomer {

struct TrainPoint {
  std::uint32_t layout = 0;
  double step_s = 0;
  double memory_bytes = 0;
};

struct TrainPlanOptions {
  TrainProblem problem;
  Hardware hardware;  // as described
  Assumptions assumptions;
  int devices = 1;
  std::vector<std::string_view> schemes;  // empty: all
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

/// The best layout of one scheme and SP, and why the next one loses to it.
struct TrainChoice {
  std::string scheme;
  TrainPoint point;
  TrainLayout layout;
  TrainTime time;
  TrainMemory memory;
  TrainAttention attention;
  double utilisation = 0;  // of peak FLOP/s, by the model's FLOPs
};

struct TrainRatio {
  std::string assumption, value;
  double ratio = 0;  // time of the best layout of `than` over that of `of`
};

struct TrainPlan {
  TrainPlanOptions options;
  Hardware assumed;
  std::vector<TrainLayout> layouts;
  std::vector<TrainPoint> points;  // what fits, quickest first
  std::int64_t examined = 0;
  std::array<std::int64_t, kNumTrainUnfit> unfit{};
  double seconds = 0;
  std::vector<TrainChoice> best;        // over all, a few, quickest first
  std::vector<TrainChoice> by_scheme;   // the best of each scheme with SP > 1
  std::string next_why;                 // what the second of `best` loses on
  std::string of, than;                 // quickest and slowest of by_scheme
  std::vector<TrainRatio> sensitivity;  // of those two, under each assumption
};

/// Throws std::invalid_argument where nothing fits: which limit binds and what is nearest.
TrainPlan plan_train(TrainPlanOptions options);
nlohmann::json to_json(const TrainPlan& plan);

}  // namespace isomer
