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
/// Peak rates, everything but the router in FP4, links of 1 us: what the paper states or what its appendix leaves.
HelixSetting helix_paper_setting();
/// Fitted efficiencies, FP4 weights, FP8 cache, BF16 between devices: what kernels and libraries do today.
HelixSetting helix_measured_setting();

// claims_helix_measured.cpp
Claim helix_exact(const ClaimsOptions& o);                   // H1
Claim helix_exchange(const ClaimsOptions& o);                // H2
Claim helix_balance(const ClaimsOptions& o);                 // H3
Claim helix_hop_b(const ClaimsOptions& o);                   // H4
Claim helix_replicated_projections(const ClaimsOptions& o);  // H11
Claim helix_layout_change(const ClaimsOptions& o);           // H12
// claims_helix.cpp
Claim helix_roofline();                              // H5
Claim helix_short_contexts(const ClaimsOptions& o);  // H9
Claim helix_sweep(const ClaimsOptions& o);           // H10
// claims_helix_ratios.cpp
Claim helix_r1(const ClaimsOptions& o);       // H6
Claim helix_llama(const ClaimsOptions& o);    // H7
Claim helix_overlap(const ClaimsOptions& o);  // H8

}  // namespace isomer
