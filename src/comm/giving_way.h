// Waiting that first gives way a few times: a peer that is nearly there then costs no sleep and no wake-up, which take
// tens of microseconds on a virtual machine, and on a crowded machine the core goes to whoever needs it.
#pragma once

#include <sched.h>

#include <mutex>

namespace isomer {

inline constexpr int kTimesToGiveWay = 40;

/// True once ready() holds, false if the caller should sleep. ready() is called with the lock held.
template <class Ready>
bool give_way_until(std::unique_lock<std::mutex>& lock, const Ready& ready) {
  for (int time = 0; time < kTimesToGiveWay; ++time) {
    if (ready()) return true;
    lock.unlock();
    sched_yield();
    lock.lock();
  }
  return ready();
}

}  // namespace isomer
