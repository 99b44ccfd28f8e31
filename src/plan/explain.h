// What a plan says about a layout, whatever it is a layout of: what bounds it, and what another loses on.
#pragma once

#include <string>
#include <vector>

#include "plan/decode_step.h"

namespace isomer {

/// What most of the operations' time goes to: "memory, 61 % of the step". "nothing" where there are none.
std::string bound_of_step(const std::vector<PricedOperation>& operations);

/// The part on which `theirs` spends most beyond `ours`, both in the same order: "exchange +310 us".
std::string loses_on(const std::vector<StepShare>& ours, const std::vector<StepShare>& theirs);

/// Fitted hardware is fitted to what its tables have. Adds to `names` the kinds of `operations` that are priced by
/// another curve ("moe bf16/bf16"), each once. Adds nothing for hardware that is not fitted, or under the roofline.
void add_stand_ins(const Hardware& hardware, const std::vector<PricedOperation>& operations,
                   std::vector<std::string>& names);

}  // namespace isomer
