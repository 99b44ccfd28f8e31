#include "comm/failure.h"

#include "core/error.h"

namespace isomer {

Failure current_failure(int rank) {
  const std::string prefix = fmt::format("rank {}: ", rank);
  try {
    throw;
  } catch (const std::invalid_argument& problem) {
    return {fmt::format("rank {} threw: {}", rank, problem.what()), problem.what(), true};
  } catch (const std::exception& problem) {
    const std::string text = problem.what();
    return {fmt::format("rank {} threw: {}", rank, text), text.starts_with(prefix) ? text : prefix + text};
  } catch (...) {
    const std::string text = "threw something that is no std::exception";
    return {fmt::format("rank {} {}", rank, text), prefix + text};
  }
}

void rethrow(const Failure& failure) {
  if (failure.is_users_mistake) throw std::invalid_argument(failure.message);
  throw Error(failure.message.empty() ? failure.reason : failure.message);
}

}  // namespace isomer
