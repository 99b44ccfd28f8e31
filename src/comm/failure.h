// How a rank failed, as text: exceptions themselves stay in the thread that threw them.
#pragma once

#include <string>

namespace isomer {

struct Failure {
  std::string reason;             // what the errors of the peers say: "rank 0 threw: …", "rank 0 left"
  std::string message;            // what run_group throws
  bool is_users_mistake = false;  // as std::invalid_argument, otherwise as isomer::Error naming the rank
};

/// Of the exception that is being handled.
Failure current_failure(int rank);
[[noreturn]] void rethrow(const Failure& failure);

}  // namespace isomer
