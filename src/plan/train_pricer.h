// What a training step is made of, operation by operation, and what that takes: one walk over the step, priced under as
// many assumptions as are wanted.
#pragma once

#include <span>
#include <vector>

#include "cost/scheme_work.h"
#include "plan/decode_step.h"
#include "plan/train_step.h"

namespace isomer {

/// An operation of one device, and the part of the step that it counts for.
struct TrainSpending {
  double TrainTime::*part = nullptr;
  const char* name = "";
  Operation operation;
  std::int64_t times = 1;
  double share = 1;                 // of its time: a ring's attention is a share of one kernel, a backward some kernels
  bool attention_backward = false;  // takes 1 / Hardware::backward_efficiency times as long
};

/// A step of one device of a layout; no figure of the hardware is in it.
struct TrainWork {
  std::vector<TrainSpending> sequences;  // through all layers of a stage and the head, forward and backward
  std::vector<TrainSpending> once;       // sums of gradients, ZeRO-3's gathers, the optimiser
  std::int64_t num_sequences = 1;
  int stages = 1;
};
TrainWork train_work(const TrainProblem& problem, const TrainLayout& layout);
/// One attention block alone, forward and backward.
std::vector<TrainSpending> block_work(const TrainProblem& problem, const TrainLayout& layout);

double seconds_of(const Hardware& hardware, const TrainSpending& spending);
/// Adds up a step. `seconds`: of the spendings of `work.sequences`, then of `work.once`.
TrainTime time_of(const TrainWork& work, std::span<const double> seconds, double link_overlap);

/// With names and bounds; spendings that take nothing are left out.
void add_operations(const Hardware& hardware, const std::vector<TrainSpending>& spendings,
                    std::vector<PricedOperation>& list);

}  // namespace isomer
