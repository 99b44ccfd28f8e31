#include "core/error.h"

#include <cstring>

namespace isomer::detail {

void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  const char* source = std::strstr(file, "src/");
  throw CheckFailure(fmt::format("{}:{}: check failed: {} ({})", source ? source : file, line, condition, values));
}

}  // namespace isomer::detail
