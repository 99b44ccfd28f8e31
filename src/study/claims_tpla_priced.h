// Priced halves of TPLA's claims (arXiv 2508.15881): what the planner says of speeds on two H800, of which nothing was
// measured here.
#pragma once

#include "study/claims.h"

namespace isomer {

Claim tpla_decode_priced(const ClaimsOptions& options);   // T5
Claim tpla_prefill_priced(const ClaimsOptions& options);  // T6

}  // namespace isomer
