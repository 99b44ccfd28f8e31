// How far a ratio moves when what is assumed about the hardware moves over its stated range.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plan/decode_search.h"

namespace isomer {

/// The two ratios by which one set of layouts is held against another.
struct LayoutRatios {
  double interactivity = 0;  // most tokens/s/user over most tokens/s/user
  double throughput = 0;     // tokens/s/device under the same limit on the step, at the limit where it is largest
  double at_step_s = 0;      // that limit
};
/// Of two frontiers (quickest first). Zero where one is empty.
LayoutRatios ratios_of(const std::vector<DecodePoint>& ours, const std::vector<DecodePoint>& theirs);

/// One assumption at one end of its range.
struct AssumedEnd {
  std::string value;  // "1 us"
  Assumptions assumptions;
  DecodePrecisions precision;
  LayoutRatios ratios;  // filled in
};
struct SensitivityRow {
  std::string assumption;  // "link latency"
  std::vector<AssumedEnd> ends;
  double spread_interactivity() const;  // largest over smallest
  double spread_throughput() const;
};
struct Sensitivity {
  LayoutRatios base;
  std::vector<SensitivityRow> rows;  // the one that matters most first (by the larger of both spreads)
  LayoutRatios lowest, highest;      // over base and all ends
};

/// Ends of what is assumed of links: 1 to 15 us, 0.5 to 1.25 times the bandwidth; around what the user assumed himself,
/// a third to three times the latency, and these factors of the bandwidth.
struct LinkRange {
  double least_latency_s = 1e-6, most_latency_s = 15e-6;
  double least_bandwidth = 0.5, most_bandwidth = 1.25;
};
LinkRange link_range(const Assumptions& base);
/// "0.5 times".
std::string times_text(double factor);

/// The ranges: those of the links, exchanged partials in fp8 and bf16, FP4 at half of what is assumed and at its whole
/// rate, contention of overlapped work 1 to 2, cache in nvfp4 to bf16, and all that favour or hinder links.
std::vector<SensitivityRow> assumption_ranges(const DecodeProblem& problem, const Assumptions& base);

struct SensitivityStudy {
  DecodeProblem problem;
  Hardware hardware;  // without assumptions
  Assumptions base;
  DecodeSearchOptions options;
  LayoutFilter ours, theirs;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};
/// Searches anew at every end.
Sensitivity study_sensitivity(const SensitivityStudy& study);

}  // namespace isomer
