// One attention block as the planner prices it, for claims about time on hardware that is not here.
#pragma once

#include <string>
#include <vector>

#include "study/claims.h"

namespace isomer {

/// DeepSeek-V3's block under explicit, explicit-shared-rope, LAGA and latent-gather: milliseconds forward and backward,
/// and LAGA's gain, for each number of ranks and each length, on one built-in description of hardware.
EvidenceTable priced_blocks(const std::string& hardware, const std::vector<int>& ranks,
                            const std::vector<std::int64_t>& seqs);

}  // namespace isomer
