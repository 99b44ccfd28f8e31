// What TPLA's layouts and prefills take on two ranks of this machine (layout_times.h), recorded under docs/data/.
#pragma once

#include "study/claims.h"
#include "study/layout_times.h"

namespace isomer {

Claim tpla_decode_speed(const ClaimsOptions& options);   // T5, measured beside its price
Claim tpla_prefill_speed(const ClaimsOptions& options);  // T6, the same

/// B2's times: tp, gla, tpla, exact-latent and kvp on one checkpoint's attention over contexts of 1K to 32K. Without a
/// recording empty.
struct SideBySideTimes {
  std::vector<LayoutTime> times;
  std::vector<std::int64_t> contexts;  // ascending
  std::int64_t batch = 0;
  std::string origin;
  bool empty() const { return times.empty(); }
  const LayoutTime& of(const std::string& layout, std::int64_t context) const;
};
SideBySideTimes side_by_side_times(const ClaimsOptions& options, const std::vector<std::string>& layouts);
EvidenceTable table_of(const SideBySideTimes& times, const std::vector<std::string>& layouts);

}  // namespace isomer
