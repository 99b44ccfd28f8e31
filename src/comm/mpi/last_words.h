// What a process says when mpirun ends it because another one was lost: the launcher knows the lost rank, only this
// process knows the call it was in.
#pragma once

#include <string_view>

namespace isomer {

/// From now on SIGTERM ends the process with a line on stderr that names this rank and the call last given.
void install_last_words(int rank);
/// The call this rank has begun; to be called by one thread only.
void set_last_call(std::string_view call);

}  // namespace isomer
