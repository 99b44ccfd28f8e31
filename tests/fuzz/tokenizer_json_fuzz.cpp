// A tokenizer.json is parsed or refused with isomer::Error, whatever the bytes; what was parsed encodes and decodes.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  isomer::fuzz::tokenizer_json(data, size);
  return 0;
}
