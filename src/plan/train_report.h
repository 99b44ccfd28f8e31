// What `isomer plan train` says: the best of every scheme on so many ranks, the layouts chosen and why, and what all
// that depends on.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plan/train_search.h"
#include "plan/train_sensitivity.h"

namespace isomer {

struct TrainPlanOptions {
  TrainProblem problem;
  Hardware hardware;  // as described
  Assumptions assumptions;
  int devices = 1;
  std::vector<std::string_view> schemes;  // empty: all
  bool sensitivity = true;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

/// A layout with what its step is made of.
struct TrainChoice {
  TrainPoint point;
  TrainLayout layout;
  TrainTime time;
  TrainMemory memory;
  TrainAttention attention;
  double utilisation = 0;  // MFU (model_flops_utilisation)
};

/// A layout that answers a question.
struct TrainAnswer {
  std::string question;  // "quickest"
  TrainChoice choice;
  std::vector<PricedOperation> operations;  // longest first
  std::string bound;                        // "arithmetic, 61 % of the step"
  std::optional<TrainChoice> next;          // the next best whose axes are others
  std::string next_loses_on;
};

/// Points of one family: its frontier of speed and memory, or its quickest layout on so many ranks.
struct TrainFamily {
  std::string family;
  bool baseline = false;
  std::vector<TrainPoint> points;
};

struct TrainPlan {
  TrainPlanOptions options;
  Hardware assumed;
  TrainSearch search;
  std::vector<TrainChoice> best;       // over all, a few, quickest first
  std::vector<TrainChoice> by_scheme;  // the best of each scheme with SP > 1, quickest first
  std::vector<TrainAnswer> chosen;
  std::vector<TrainFamily> by_ranks;  // points by the ranks that a sequence lies on, fewest first
  std::vector<TrainFamily> frontiers;
  std::vector<std::string> stand_ins;  // kinds of operations of the chosen that no curve of this device was fitted to
  std::optional<TrainSensitivity> sensitivity;
};

/// Searches and explains. Throws std::invalid_argument where nothing fits: which limit binds and what is nearest.
TrainPlan plan_train(TrainPlanOptions options);

double tokens_per_s_per_device(const TrainPlan& plan, const TrainPoint& point);

nlohmann::json to_json(const TrainPlan& plan);

}  // namespace isomer
