// What none of the papers has (docs/claims.md), a function each; `id` is filled in by the registry in claims.cpp.
#pragma once

#include "study/claim_runs.h"
#include "study/claims.h"

namespace isomer {

// claims_beyond_schemes.cpp
Claim beyond_latent_schemes(ClaimRuns& runs);  // B1
// claims_tpla_engine.cpp
Claim beyond_side_by_side(ClaimRuns& runs);  // B2
// claims_beyond_tpla.cpp
Claim beyond_shared_columns(ClaimRuns& runs);  // B5

}  // namespace isomer
