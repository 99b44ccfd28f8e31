// What the backends share in starting a rank.
#pragma once

#include <exception>
#include <string>

#include "comm/group.h"
#include "comm/transport.h"

namespace isomer {

RankOptions rank_options(const GroupOptions& options, int rank);
/// The link measured where none was given, and whether it is emulated in wall time.
TransportOptions transport_options(const GroupOptions& options);
int ranks_on_this_machine(const GroupOptions& options);

struct RankFailure {
  std::string reason;        // for the errors of the peers: "rank 0 threw: …"
  std::exception_ptr error;  // what run_group throws
};
RankFailure describe_failure(int rank, std::exception_ptr error);

}  // namespace isomer
