// Errors and invariants. A user's mistake is std::invalid_argument (parameter, value, limit, remedy); trouble
// from outside (file, MPI, a lost peer) is isomer::Error; a broken invariant of ours is ISOMER_CHECK.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace isomer {

/// Trouble that comes from outside the process: a file, a peer, the message-passing library.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken invariant of this library. Seeing one is a bug worth reporting.
class CheckFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);
}  // namespace detail

/// Throws std::invalid_argument with a formatted message.
template <class... Args>
[[noreturn]] void invalid_argument(fmt::format_string<Args...> format, Args&&... args) {
  throw std::invalid_argument(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace isomer

/// ISOMER_CHECK(condition, "format {}", values…): on in release; prints the condition and the values.
#define ISOMER_CHECK(condition, ...)                                                              \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      ::isomer::detail::check_failed(__FILE__, __LINE__, #condition, ::fmt::format(__VA_ARGS__)); \
  } while (false)
