// Evidence that several claims show: what stands in two peaks, tensor by tensor.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "study/claim_runs.h"
#include "study/claims.h"

namespace isomer {

/// "name (class)" → bytes.
std::map<std::string, double> standing_by_name(const std::vector<StandingTensor>& tensors);

/// `other`'s dry-run peak less `base`'s, tensor by tensor, at each of `seqs` (which replace the cases' own); tensors
/// that are in both at the same size are left out. Largest difference first.
EvidenceTable standing_differences(ClaimRuns& runs, ClaimCase base, ClaimCase other,
                                   const std::vector<std::int64_t>& seqs);

}  // namespace isomer
