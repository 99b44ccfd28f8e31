// The seam to the MPI backend: mpi/ implements it where MPI was found, mpi_absent/ throws elsewhere.
#pragma once

#include <functional>

#include "comm/group.h"

namespace isomer {

/// run_group for a process that is one rank of an MPI world of options.num_ranks ranks. If body throws, the error is
/// printed once and the whole world ends with it (MPI_Abort), since a lost rank can't be waited for.
void run_mpi_group(const GroupOptions& options, const std::function<void(RankContext&)>& body);

}  // namespace isomer
