// What HOP-B hides of the exchange, measured: decode steps with and without overlap in turn, on the same ranks, the
// same caches and the same emulated link.
#pragma once

#include <string>
#include <vector>

#include "comm/group.h"
#include "model/model_weights.h"

namespace isomer {

struct OverlapCase {
  int kvp = 2;  // ranks, of one thread each
  std::int64_t context = 8192, batch = 8;
  int pairs = 31;  // of steps
  std::uint64_t seed = 1;
};

struct OverlapTimes {
  OverlapCase of;
  bool virtual_clock = false;
  double attention_s = 0;           // a step's without overlap, the median
  double exchange_s = 0;            // a step's partial outputs on the link
  std::vector<double> on_s, off_s;  // steps in pairs, each of the slowest rank
  double cost_s = 0;                // by which overlap makes a step longer without a link, where nothing is hidden

  struct Share {
    double median, low, high;  // of the exchange; low to high: 95 % for the median, by its order statistics
  };
  /// Time that a step is quicker with overlap, over that of the exchange.
  Share hidden() const;
  /// (B − 1)/B: all but one sequence's exchange, where attention takes longer than the exchange.
  double hidden_by_formula() const { return static_cast<double>(of.batch - 1) / static_cast<double>(of.batch); }
};

/// Latent attention. The link's bandwidth is set so that the exchange takes half of the attention, as a run without a
/// link has it; its latency is 0. `weights` decide the dtype. Contexts beyond the model's positions are taken.
OverlapTimes time_overlap(const ModelConfig& config, const ModelWeights& weights, const OverlapCase& c);

}  // namespace isomer
