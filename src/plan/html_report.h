// A plan as one HTML file that needs no network: Chart.js (MIT licence) and the figures are inside.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace isomer {

/// `plan`: to_json of a DecodePlan or TrainPlan, told apart by its "command". The page marks itself:
/// data-report="ready" on its body once drawn, "failed" with the message after any script error.
std::string plan_html(const nlohmann::json& plan);

/// Replaces what would end a script element early.
std::string script_safe(std::string_view json_text);

}  // namespace isomer
