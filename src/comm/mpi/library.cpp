#include "comm/mpi/library.h"

#include "comm/group.h"
#include "comm/last_words.h"
#include "comm/run_rank.h"
#include "core/error.h"

namespace isomer {

MpiLibrary& MpiLibrary::instance() {
  static MpiLibrary library;
  return library;
}

MpiLibrary::MpiLibrary() {
  join_launcher();
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  if (provided < MPI_THREAD_SERIALIZED)
    throw Error("this MPI library gives no MPI_THREAD_SERIALIZED, which the communication thread of a rank needs");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  install_last_words(rank_, own_call_slot());  // again: a training run has taken SIGTERM meanwhile
}

MpiLibrary::~MpiLibrary() { MPI_Finalize(); }

void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(fmt::format("{}: {}", function, text));
}

}  // namespace isomer
