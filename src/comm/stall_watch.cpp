#include "comm/stall_watch.h"

#include <fmt/format.h>

#include "core/record.h"

namespace isomer {

double StallWatch::age_s(Seen& seen, std::uint64_t value, double now_s) {
  if (seen.since_s == 0 || seen.value != value) seen = {value, now_s};
  return now_s - seen.since_s;
}

std::string StallWatch::verdict(int rank) {
  auto reason = signs_.failure_reason();
  if (!reason.empty()) return reason;
  if (signs_.has_left(rank)) return fmt::format("rank {} left", rank);
  const double now_s = wall_clock_s();
  const double silent_s = age_s(beats_[rank], signs_.beat(rank), now_s);
  const double standstill_s = age_s(progress_, signs_.progress(), now_s);
  const double stalled_s = signs_.is_waiting(rank) ? std::min(silent_s, standstill_s) : silent_s;
  if (stalled_s < signs_.timeout_s()) return {};
  return fmt::format("rank {} showed no sign of life for {:g} s{}", rank, signs_.timeout_s(), signs_.doing(rank));
}

}  // namespace isomer
