// What the backends share in starting a rank.
#pragma once

#include "comm/group.h"
#include "comm/transport.h"

namespace isomer {

RankOptions rank_options(const GroupOptions& options, int rank);
/// True if the user gave no link, so that the copy bandwidth of the machine stands for it.
bool measures_link(const GroupOptions& options);
/// The link as it was given, and whether it is emulated in wall time.
TransportOptions transport_options(const GroupOptions& options);
int ranks_on_this_machine(const GroupOptions& options);

}  // namespace isomer
