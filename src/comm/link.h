// A rank's port to the link: when it is free again, on the virtual clock and, where the link is emulated, in wall time.
#pragma once

#include "comm/transport.h"

namespace isomer {

/// Bytes per second that one thread copies from memory to memory; measured at the first call, for at most 50 ms.
double copy_bandwidth_bytes_per_s();

/// Owned by the communication thread of a rank. Calls pass it in the order of their issue.
class LinkPort {
 public:
  /// Sets when `call`, issued at these times, may begin.
  void enter(Call& call) const;
  /// Holds the port for the transfer and returns its completion on the virtual clock; in wall time it returns no
  /// sooner than the transfer takes.
  double pass(const Call& call, const Transport& transport, const Latest& latest);

 private:
  double free_s_ = 0;
  double free_wall_s_ = 0;
};

}  // namespace isomer
