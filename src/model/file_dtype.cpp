#include "model/file_dtype.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"

namespace isomer {

namespace {

struct Row {
  FileDType dtype;
  std::string_view name;
  std::int64_t size;
};
constexpr std::array kRows{
    Row{FileDType::f64, "F64", 8},   Row{FileDType::f32, "F32", 4},         Row{FileDType::f16, "F16", 2},
    Row{FileDType::bf16, "BF16", 2}, Row{FileDType::f8_e4m3, "F8_E4M3", 1}, Row{FileDType::f8_e5m2, "F8_E5M2", 1},
    Row{FileDType::i64, "I64", 8},   Row{FileDType::i32, "I32", 4},         Row{FileDType::i16, "I16", 2},
    Row{FileDType::i8, "I8", 1},     Row{FileDType::u64, "U64", 8},         Row{FileDType::u32, "U32", 4},
    Row{FileDType::u16, "U16", 2},   Row{FileDType::u8, "U8", 1},           Row{FileDType::boolean, "BOOL", 1},
};
const Row& row_of(FileDType dtype) { return kRows[static_cast<std::size_t>(dtype)]; }

/// Reads an element that may lie at any address.
template <class T>
T load(const void* from, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class Load, class To>
void convert_loop(std::int64_t count, To* to, Load&& load_element) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(load_element(i));
}

std::array<float, 256> e4m3_table() {
  std::array<float, 256> table;
  for (int i = 0; i < 256; ++i) table[static_cast<std::size_t>(i)] = e4m3_to_float(static_cast<std::uint8_t>(i));
  return table;
}

}  // namespace

std::string_view name_of(FileDType dtype) { return row_of(dtype).name; }
std::int64_t size_of(FileDType dtype) { return row_of(dtype).size; }

std::optional<FileDType> file_dtype_of(std::string_view name) {
  for (const auto& row : kRows)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

FileDType file_dtype_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return FileDType::f32;
    case DType::bf16: return FileDType::bf16;
    case DType::f64: return FileDType::f64;
  }
  return FileDType::f32;
}

bool is_convertible(FileDType dtype) { return dtype <= FileDType::f8_e4m3; }

std::optional<DType> same_bits(FileDType dtype) {
  switch (dtype) {
    case FileDType::f32: return DType::f32;
    case FileDType::bf16: return DType::bf16;
    case FileDType::f64: return DType::f64;
    default: return std::nullopt;
  }
}

float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // A half's bits, moved to a float's place, are 2^-112 times its value, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

float e4m3_to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 0xf, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

void convert_elements(FileDType from_dtype, const void* from, std::int64_t count, DType to_dtype, void* to) {
  if (same_bits(from_dtype) == to_dtype) {
    if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count * size_of(to_dtype)));
    return;
  }
  visit_dtype(to_dtype, [&]<class To>() {
    To* out = static_cast<To*>(to);
    switch (from_dtype) {
      case FileDType::f64: return convert_loop(count, out, [&](auto i) { return load<double>(from, i); });
      case FileDType::f32: return convert_loop(count, out, [&](auto i) { return load<float>(from, i); });
      case FileDType::bf16:
        return convert_loop(count, out, [&](auto i) { return static_cast<float>(load<bf16>(from, i)); });
      case FileDType::f16:
        return convert_loop(count, out, [&](auto i) { return half_to_float(load<std::uint16_t>(from, i)); });
      default: break;
    }
    ISOMER_CHECK(false, "no conversion from {}", name_of(from_dtype));
  });
}

void convert_e4m3_scaled(const void* from, std::int64_t count, float scale, DType to_dtype, void* to) {
  static const std::array<float, 256> kTable = e4m3_table();
  const float* table = kTable.data();
  visit_dtype(to_dtype, [&]<class To>() {
    convert_loop(count, static_cast<To*>(to), [&](auto i) {
      return static_cast<double>(table[load<std::uint8_t>(from, i)]) * static_cast<double>(scale);
    });
  });
}

}  // namespace isomer
