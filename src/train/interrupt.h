// Ctrl-C (SIGINT), SIGTERM and SIGUSR1 ask a run to stop at the end of its step, with a checkpoint. A second one ends
// it at once.
#pragma once

#include <atomic>

namespace isomer {

/// Catches these signals while it lives; one object at a time.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;
  const std::atomic<bool>& requested() const;
};

}  // namespace isomer
