// The element types of checkpoint files, and their way into the types that Isomer computes in.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/dtype.h"

namespace isomer {

enum class FileDType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,  // the finite variant: no infinities, NaN is 0x7f and 0xff
  f8_e5m2,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

/// As a safetensors header writes it: "F32", "BF16", "F8_E4M3" …
std::string_view name_of(FileDType dtype);
/// Nothing for an unknown name.
std::optional<FileDType> file_dtype_of(std::string_view name);
FileDType file_dtype_of(DType dtype);
std::int64_t size_of(FileDType dtype);
/// Floating-point types that Isomer reads; the others are listed, not converted.
bool is_convertible(FileDType dtype);
/// The same bits as a DType, where there is one.
std::optional<DType> same_bits(FileDType dtype);

float half_to_float(std::uint16_t bits);
float e4m3_to_float(std::uint8_t bits);

/// Converts `count` elements, rounded once (through float32 into bfloat16); `from` needs no alignment.
void convert_elements(FileDType from_dtype, const void* from, std::int64_t count, DType to_dtype, void* to);

/// The same for FP8 with one scale for all of them: value × scale, exact until rounded into the target.
void convert_e4m3_scaled(const void* from, std::int64_t count, float scale, DType to_dtype, void* to);

}  // namespace isomer
