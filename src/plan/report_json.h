// What the JSON of both plans has in common.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <vector>

#include "plan/decode_step.h"

namespace isomer {

/// What was assumed instead of the description, or otherwise than usual: {link_latency_s (null: the description's),
/// link_bandwidth_factor, fp4_efficiency, overlap_contention, kernel_efficiency, link_overlap}.
nlohmann::json assumptions_json(const Assumptions& assumptions);
/// [{part, seconds}].
nlohmann::json time_json(const std::vector<StepShare>& shares);
/// [{name, kind, times, seconds, bound}].
nlohmann::json operations_json(const std::vector<PricedOperation>& operations);

/// {examined, priced, omitted: [{reason, count}], seconds}; `unfit` counts by reason, the first of which is that it
/// fits.
template <class Reason>
nlohmann::json configurations_json(std::int64_t examined, std::size_t priced, std::span<const std::int64_t> unfit,
                                   double seconds) {
  auto omitted = nlohmann::json::array();
  for (std::size_t i = 1; i < unfit.size(); ++i) {
    if (unfit[i] > 0) omitted.push_back({{"reason", reason_of(static_cast<Reason>(i))}, {"count", unfit[i]}});
  }
  return {{"examined", examined}, {"priced", priced}, {"omitted", omitted}, {"seconds", seconds}};
}

}  // namespace isomer
