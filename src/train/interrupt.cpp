#include "train/interrupt.h"

#include <csignal>

namespace isomer {

namespace {

// A signal handler can reach nothing but a static.
std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};  // SIGUSR1: Ctrl-C as it comes through mpirun (comm/launch.cpp)

void on_signal(int signal) {
  if (stop_requested.exchange(true)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

StopOnSignal::StopOnSignal() {
  stop_requested = false;
  for (const int signal : kSignals) std::signal(signal, on_signal);
}

StopOnSignal::~StopOnSignal() {
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
}

const std::atomic<bool>& StopOnSignal::requested() const { return stop_requested; }

}  // namespace isomer
