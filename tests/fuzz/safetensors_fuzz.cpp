// A header is parsed or refused with isomer::Error, whatever the bytes; a tensor that is let through lies in the file.
#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto file_bytes = static_cast<std::int64_t>(size);
  try {
    for (const isomer::TensorInfo& tensor : isomer::parse_safetensors_header(bytes, file_bytes, "fuzz").tensors) {
      const bool inside = tensor.begin >= 0 && tensor.bytes >= 0 && tensor.bytes <= file_bytes - tensor.begin;
      ISOMER_CHECK(inside, "{} bytes at {} of {}", tensor.bytes, tensor.begin, file_bytes);
    }
  } catch (const isomer::Error&) {}
  try {
    isomer::parse_weight_map(bytes, "fuzz");
  } catch (const isomer::Error&) {}
  return 0;
}
