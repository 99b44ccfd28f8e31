// A GGUF file is read or refused with isomer::Error, whatever the bytes; so are its configuration and its tokenizer.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  isomer::fuzz::gguf(data, size);
  return 0;
}
