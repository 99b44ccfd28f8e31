#include "comm/mpi/patience.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "core/record.h"

namespace isomer {

namespace {

constexpr double kEager_s = 50e-6;
constexpr double kGivingWay_s = 5e-3;  // longer than a chunk takes on its way

}  // namespace

Patience::Patience(int num_ranks, double look_s)
    : crowded_(num_ranks > static_cast<int>(std::thread::hardware_concurrency())),
      look_s_(look_s),
      next_look_s_(wall_clock_s() + look_s) {}

bool Patience::pause() {
  // Reading the clock costs about as much as a question.
  if (!crowded_ && since_s_ > 0 && ++questions_ % 8 != 0) return false;
  const double now_s = wall_clock_s();
  if (since_s_ == 0) since_s_ = now_s;
  const double waited_s = now_s - since_s_;
  if (waited_s > kGivingWay_s) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  } else if (crowded_ || waited_s > kEager_s) {
    sched_yield();
  }
  if (now_s < next_look_s_) return false;
  next_look_s_ = now_s + look_s_;
  return true;
}

}  // namespace isomer
