#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  isomer::fuzz::tpla_side(data, size);
  return 0;
}
