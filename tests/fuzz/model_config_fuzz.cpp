// A configuration is parsed or refused with isomer::Error, whatever the bytes.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/error.h"
#include "model/config.h"
#include "model/json_text.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const isomer::ModelConfig config = isomer::parse_model_config(isomer::parse_json(text, "fuzz"), "fuzz");
    isomer::num_parameters(config);
    isomer::cache_elements_per_token(config);
  } catch (const isomer::Error&) {}
  return 0;
}
