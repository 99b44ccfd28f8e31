// What a process says when mpirun ends it because another one was lost: the launcher knows the lost rank, only this
// process knows the call it was in.
#pragma once

#include "comm/call_board.h"

namespace isomer {

/// From now on SIGTERM ends the process with a line on stderr that names this rank and the call that `slot` shows last.
/// `slot` must live as long as the process.
void install_last_words(int rank, CallSlot& slot);

}  // namespace isomer
