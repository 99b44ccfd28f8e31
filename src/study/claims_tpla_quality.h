// TPLA's claims (arXiv 2508.15881) about quality, on models at hand (a small model's order is not V2-Lite's), and about
// what is cached and computed.
#pragma once

#include "study/claims.h"

namespace isomer {

Claim tpla_same_function(const ClaimsOptions& options);  // T1
Claim tpla_cache(const ClaimsOptions& options);          // T2
Claim tpla_perplexity(const ClaimsOptions& options);     // T3
Claim tpla_ablation(const ClaimsOptions& options);       // T4
Claim tpla_flops(const ClaimsOptions& options);          // T7
Claim tpla_more_shards(const ClaimsOptions& options);    // T8
Claim tpla_calibration(const ClaimsOptions& options);    // T9
Claim tpla_condition(const ClaimsOptions& options);      // T10
Claim tpla_alignment(const ClaimsOptions& options);      // T11

}  // namespace isomer
