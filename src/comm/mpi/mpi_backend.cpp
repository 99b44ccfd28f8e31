#include "comm/mpi_backend.h"

#include "core/error.h"

namespace isomer {

bool mpi_available() { return false; }  // until the backend lands

void run_mpi_group(const GroupOptions&, const std::function<void(RankContext&)>&) {
  invalid_argument(
      "backend = mpi: this build has no MPI; install Open MPI (libopenmpi-dev) and configure again, or use "
      "the threads backend");
}

}  // namespace isomer
