// What the backends share in starting a rank.
#pragma once

#include "comm/call_board.h"
#include "comm/group.h"
#include "comm/transport.h"

namespace isomer {

RankOptions rank_options(const GroupOptions& options, int rank);
/// True if the user gave no link, so that the copy bandwidth of the machine stands for it.
bool measures_link(const GroupOptions& options);
/// The link as it was given, and whether it is emulated in wall time.
TransportOptions transport_options(const GroupOptions& options);
int ranks_on_this_machine(const GroupOptions& options);

/// What this process shows of itself to the others; needs join_launcher().
CallSlot& own_call_slot();
/// The board of the process that launched this one; null where there is none, or it is on another machine.
const CallBoard* launchers_board();

}  // namespace isomer
