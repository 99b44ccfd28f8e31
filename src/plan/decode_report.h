// What `isomer plan decode` says: frontiers by family, the layouts chosen and why, what their ratios depend on.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plan/decode_search.h"
#include "plan/sensitivity.h"

namespace isomer {

struct DecodePlanOptions {
  DecodeProblem problem;
  Hardware hardware;  // as described
  Assumptions assumptions;
  DecodeSearchOptions search;
  std::optional<double> ttl_s;
  bool sensitivity = true;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

/// Layouts that were in use before Helix: TP, PP, EP, DP attention, and KV parallelism as Medha has it.
bool is_baseline(const DecodeLayout& layout);

struct FamilyFrontier {
  std::string family;
  bool exact = true;
  std::vector<DecodePoint> points;
};

/// A layout that answers a question.
struct ChosenLayout {
  std::string question;  // "most tokens/s a device"
  DecodePoint point;
  std::string layout;
  StepTime time;
  DecodeMemory memory;
  std::vector<PricedOperation> operations;  // longest first
  std::string bound;                        // "memory, 61 % of the step"
  std::optional<Neighbour> next;
  std::string next_layout;
};

struct DecodePlan {
  DecodePlanOptions options;
  Hardware assumed;  // hardware under the assumptions
  DecodeSearch search;
  std::vector<FamilyFrontier> frontiers;
  std::vector<DecodePoint> overall;  // of the layouts that may win
  std::vector<ChosenLayout> chosen;
  std::vector<std::string> stand_ins;  // kinds of operations of the chosen that no curve of this device was fitted to
  std::optional<Sensitivity> sensitivity;  // helix against the baselines
};

/// Searches and explains. Throws std::invalid_argument where nothing fits or meets the limit: what binds, and the
/// nearest that does.
DecodePlan plan_decode(DecodePlanOptions options);

nlohmann::json to_json(const DecodePlan& plan);

}  // namespace isomer
