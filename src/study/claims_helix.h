// The claims of Helix (arXiv 2507.07120), a function each; `id` is filled in by the registry in claims_helix.cpp.
#pragma once

#include "plan/decode_search.h"
#include "plan/sensitivity.h"
#include "study/claims.h"

namespace isomer {

/// What the claims about layouts share: models on GB200 NVL72 at one million tokens of context.
struct HelixSetting {
  std::string name;  // "the paper's", "measured"
  DecodePrecisions precision;
  Assumptions assumptions;
};
/// Peak rates, everything in FP4, links of 1 us: what the paper states or what its appendix leaves.
HelixSetting helix_paper_setting();
/// Fitted efficiencies, FP4 weights, FP8 cache, BF16 between devices: what kernels and libraries do today.
HelixSetting helix_measured_setting();

// claims_helix.cpp
Claim helix_roofline();                              // H5
Claim helix_short_contexts(const ClaimsOptions& o);  // H9
Claim helix_sweep(const ClaimsOptions& o);           // H10
// claims_helix_ratios.cpp
Claim helix_r1(const ClaimsOptions& o);       // H6
Claim helix_llama(const ClaimsOptions& o);    // H7
Claim helix_overlap(const ClaimsOptions& o);  // H8

}  // namespace isomer
