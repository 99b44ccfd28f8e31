// The claims of LAGA (arXiv 2607.17644), a function each; `id` is filled in by the registry in claims.cpp.
#pragma once

#include "study/claim_runs.h"
#include "study/claims.h"

namespace isomer {

// claims_laga_bytes.cpp
Claim laga_forward_bytes(ClaimRuns& runs);       // L1
Claim laga_ratio_stability(ClaimRuns& runs);     // L2
Claim laga_against_frameworks(ClaimRuns& runs);  // L3
// claims_laga_memory.cpp
Claim laga_eager_gap(ClaimRuns& runs);          // L4
Claim laga_other_accelerator(ClaimRuns& runs);  // L6
// claims_laga_fused.cpp
Claim laga_fused_gap(ClaimRuns& runs);  // L5
// claims_laga_peaks.cpp
Claim laga_peak_of_laga(ClaimRuns& runs);  // L7
Claim laga_sign_flip(ClaimRuns& runs);     // L8
// claims_laga_numerics.cpp
Claim laga_one_rank_bits(ClaimRuns& runs);      // L9
Claim laga_gradient_accuracy(ClaimRuns& runs);  // L10
// claims_laga_flops.cpp
Claim laga_flops(ClaimRuns& runs);  // L12
// claims_laga_training.cpp
Claim laga_training(ClaimRuns& runs);  // L11
// claims_laga_throughput.cpp
Claim laga_throughput(ClaimRuns& runs);  // L13
// claims_laga_routing.cpp
Claim laga_routing_noise(ClaimRuns& runs);  // L14

}  // namespace isomer
