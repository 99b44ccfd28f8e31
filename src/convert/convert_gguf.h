// GGUF → a Hugging Face directory: safetensors, config.json, tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>

#include "core/dtype.h"

namespace isomer {

struct GgufConversion {
  std::filesystem::path model;  // a GGUF file
  std::filesystem::path out;    // a directory that doesn't exist yet
  DType dtype = DType::f32;     // of the weights written; float32 holds every dequantised value exactly
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
};

/// Writes the directory whole or not at all. Routers' correction biases stay float32. Throws std::invalid_argument
/// where something stands at `out` or `model` is no GGUF file, isomer::Error for a file that is wrong or doesn't hold
/// what its metadata say.
void convert_gguf(const GgufConversion& conversion);

}  // namespace isomer
