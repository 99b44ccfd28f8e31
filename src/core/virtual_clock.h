// The virtual clock of a rank: kernels add the processor time they used; a collective completes at the latest issue
// time of its group plus the link's time; waiting takes the maximum (design contract 6).
#pragma once

#include <algorithm>

namespace isomer {

/// A link is one full-duplex port per rank: latency × rounds + max(out, in) / bandwidth.
struct LinkModel {
  double latency_s = 0;
  double bandwidth_bytes_per_s = 0;  // 0: no limit
  bool emulated = false;             // asked for by the user (--link), hence named in every output

  double transfer_s(double bytes_out, double bytes_in, int rounds) const {
    const double bytes = std::max(bytes_out, bytes_in);
    return latency_s * rounds + (bandwidth_bytes_per_s > 0 ? bytes / bandwidth_bytes_per_s : 0.0);
  }
};

/// It never goes back: ports and peers remember its times, so intervals are differences of now_s().
class VirtualClock {
 public:
  double now_s() const { return now_s_; }
  void advance(double seconds) { now_s_ += seconds; }
  void wait_until(double time_s) {
    if (time_s > now_s_) {
      waited_s_ += time_s - now_s_;
      now_s_ = time_s;
    }
  }
  /// Time spent waiting for collectives (peers and link).
  double waited_s() const { return waited_s_; }

 private:
  double now_s_ = 0;
  double waited_s_ = 0;
};

}  // namespace isomer
