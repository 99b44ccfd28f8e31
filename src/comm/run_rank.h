// What the backends share in starting a rank.
#pragma once

#include "comm/group.h"
#include "comm/transport.h"

namespace isomer {

RankOptions rank_options(const GroupOptions& options, int rank);
/// The link measured where none was given, and whether it is emulated in wall time.
TransportOptions transport_options(const GroupOptions& options);
int ranks_on_this_machine(const GroupOptions& options);

}  // namespace isomer
