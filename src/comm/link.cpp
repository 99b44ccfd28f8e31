#include "comm/link.h"

#include <time.h>

#include <cstring>
#include <vector>

namespace isomer {

namespace {

double measure_copy_bandwidth() {
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  constexpr double kBudget_s = 0.02;
  std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes, 2);
  double best_s = 1e9;
  const double begin_s = wall_clock_s();
  do {
    const double copy_begin_s = wall_clock_s();
    std::memcpy(to.data(), from.data(), kBytes);
    asm volatile("" : : "r"(to.data()) : "memory");
    best_s = std::min(best_s, wall_clock_s() - copy_begin_s);
  } while (wall_clock_s() - begin_s < kBudget_s);
  return static_cast<double>(kBytes) / best_s;
}

void sleep_until(double wall_s) {
  const auto whole_s = static_cast<time_t>(wall_s);
  const timespec until{whole_s, static_cast<long>((wall_s - static_cast<double>(whole_s)) * 1e9)};
  while (wall_clock_s() < wall_s) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

}  // namespace

double copy_bandwidth_bytes_per_s() {
  static const double bandwidth = measure_copy_bandwidth();
  return bandwidth;
}

void LinkPort::enter(Call& call) const {
  call.ready_s = std::max(call.ready_s, free_s_);
  call.ready_wall_s = std::max(call.ready_wall_s, free_wall_s_);
}

double LinkPort::pass(const Call& call, const Transport& transport, const Latest& latest) {
  const int rank = transport.rank();
  const auto& [link, real_time] = transport.options();
  const double transfer_s = link.transfer_s(static_cast<double>(call.bytes_to_others(rank)),
                                            static_cast<double>(call.bytes_from_others(rank)), 1);
  free_s_ = latest.ready_s + transfer_s;
  if (real_time) {
    free_wall_s_ = latest.ready_wall_s + transfer_s;
    sleep_until(free_wall_s_);
  }
  return free_s_;
}

}  // namespace isomer
