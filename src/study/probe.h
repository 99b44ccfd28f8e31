// Measures this machine as the planner sees a device: one rank with its threads, and the ranks' links through memory.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/curves.h"
#include "plan/samples.h"

namespace isomer {

struct ProbeOptions {
  int threads_per_rank = 1;
  int num_ranks = 2;  // of the links; 1: no links
  /// Each shape is run for about so long, at least three times.
  double seconds_per_shape = 0.03;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

struct ProbeResult {
  nlohmann::json hardware;  // a hardware file, curves included
  std::vector<Curve> curves;
  std::vector<std::string> not_fitted;  // families with too few rows
  std::size_t num_shapes = 0;
};

/// Times kernels by the thread's processor time where a rank has one thread (as the virtual clock does), else by the
/// wall; collectives by the wall. Takes about a minute on two cores. Throws std::invalid_argument for options out of
/// range, isomer::Error where a rank fails.
ProbeResult probe_machine(const ProbeOptions& options);

/// Bytes per second that one thread reads from memory; the best of several passes over 256 MiB.
double read_bandwidth();

/// Samples of the kernels of one rank: products, attention of prefill and decode, elementwise work.
void sample_kernels(const ProbeOptions& options, SampleFamilies& families);
/// Samples of the collectives between options.num_ranks ranks.
void sample_collectives(const ProbeOptions& options, SampleFamilies& families);

}  // namespace isomer
