// How a training plan moves when what is assumed about the hardware moves over its stated range.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plan/train_search.h"

namespace isomer {

/// A figure as described, and its lowest and highest over all ends of all ranges.
struct Interval {
  double base = 0, lowest = 0, highest = 0;
  void widen(double value);
};

/// Under one assumption, the best layout of every family chosen anew.
struct TrainEnd {
  std::string value;  // "1 us"
  Assumptions assumptions;
  std::map<std::string, double> step_s;  // by family (family_of)
  double quickest_s() const;             // of all families
};
struct TrainRange {
  std::string assumption;
  std::vector<TrainEnd> ends;
};
/// How far one family is behind the quickest layout of all.
struct TrainBehind {
  std::string family;
  Interval times;
};

struct TrainSensitivity {
  Interval step_s;  // of the quickest layout
  std::string ours,
      theirs;      // families of the best layout that is not a baseline and of the best that is; empty: no ratio
  Interval ratio;  // time of a step of the best of the baselines over that of the best of the others
  std::vector<TrainRange> rows;  // what moves the ratio most first; without one, what moves the step most
  std::string step_depends_on;   // the assumption that moves the step most
  std::vector<TrainBehind> behind;
  TrainEnd described, roofline;  // beside the ranges
  double ratio_at(const TrainEnd& end) const;
};

/// The ranges: link latency 1 to 15 us, bandwidth 0.5 to 1.25 times, none to 0.9 of the links beside kernels, kernels
/// at 0.7 to 1.15 times their curves, attention's backward at 0.6 to once its forward's efficiency, experts balanced or
/// by a power law (where there are any), and all that favour or hinder links.
std::vector<TrainRange> train_ranges(const TrainProblem& problem, const Assumptions& base);

struct TrainStudy {
  const TrainProblem& problem;
  const Hardware& hardware;  // without assumptions
  const Assumptions& base;
  const TrainSearch& search;  // under `base`; what fits does not depend on an assumption
  std::function<void(const std::string&)> progress;
};
TrainSensitivity study_train(const TrainStudy& study);

}  // namespace isomer
