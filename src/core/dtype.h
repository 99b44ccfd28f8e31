// The element types that Isomer computes in. Types that exist only in files (float16, FP8) live in src/model.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace isomer {

enum class DType : std::uint8_t { f32, bf16, f64 };

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::f64: return 8;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f64: return "f64";
  }
  return "?";
}

/// The distance from 1 to the next representable number.
constexpr double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 0x1p-23;
    case DType::bf16: return 0x1p-7;
    case DType::f64: return 0x1p-52;
  }
  return 0;
}

/// bfloat16 storage; arithmetic is done in float32.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  /// Rounds to nearest, ties to even; keeps NaN a NaN.
  explicit bf16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((word >> 16) | 0x40u);
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
  }
  explicit bf16(double value) : bf16(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

/// The DType of a C++ element type.
template <class T>
inline constexpr DType kDTypeOf = DType::f32;
template <>
inline constexpr DType kDTypeOf<bf16> = DType::bf16;
template <>
inline constexpr DType kDTypeOf<double> = DType::f64;

/// Calls fn.template operator()<T>() with the C++ type of `dtype`.
template <class Fn>
decltype(auto) visit_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::bf16: return fn.template operator()<bf16>();
    case DType::f64: return fn.template operator()<double>();
    default: return fn.template operator()<float>();
  }
}

}  // namespace isomer
