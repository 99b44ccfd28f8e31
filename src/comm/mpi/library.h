// The MPI library of this process, which can be started and ended only once.
#pragma once

#include <mpi.h>

#include <string>

namespace isomer {

/// The one process-wide state of Isomer: started at the first use, finalised when the process exits.
class MpiLibrary {
 public:
  static MpiLibrary& instance();

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Isomer's own communicator of all ranks; its errors are returned, not fatal.
  MPI_Comm comm() const { return comm_; }

  /// Numbers the runs of this process, which are the same runs in all.
  int next_run() { return ++num_runs_; }

  MpiLibrary(const MpiLibrary&) = delete;
  MpiLibrary& operator=(const MpiLibrary&) = delete;

 private:
  MpiLibrary();
  ~MpiLibrary();

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int num_runs_ = 0;
};

/// Throws isomer::Error with MPI's own text if `code` is not success.
void check_mpi(int code, const char* function);

}  // namespace isomer
