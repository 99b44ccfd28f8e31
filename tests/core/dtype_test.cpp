#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace isomer {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

float round_trip(float value) { return static_cast<float>(bf16(value)); }

TEST(Bf16, KeepsWhatItRepresents) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const float wide = value;
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(round_trip(wide)));
    } else {
      EXPECT_EQ(bf16(wide).bits, bits);  // infinities, denormals and both zeros too
    }
  }
}

TEST(Bf16, RoundsToNearestAndTiesToEven) {
  const float step = 0x1p-7f, half = 0x1p-8f, little = 0x1p-20f;  // at 1
  EXPECT_EQ(round_trip(1 + half), 1);                             // a tie: the even neighbour is below
  EXPECT_EQ(round_trip(1 + half + little), 1 + step);
  EXPECT_EQ(round_trip(1 + half - little), 1);
  EXPECT_EQ(round_trip(1 + step + half), 1 + 2 * step);  // a tie: the even neighbour is above
  EXPECT_EQ(round_trip(1 + step + half - little), 1 + step);
  EXPECT_EQ(round_trip(-(1 + half)), -1);
  EXPECT_EQ(round_trip(-(1 + step + half)), -(1 + 2 * step));
  EXPECT_EQ(round_trip(2 - half / 2), 2);  // into the next exponent
}

TEST(Bf16, RoundsEveryFloatToTheNearest) {
  std::uint32_t bits = 1;
  for (int i = 0; i < 200000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    const float value = std::bit_cast<float>(bits), rounded = round_trip(value);
    if (!std::isfinite(value) || !std::isfinite(rounded)) continue;
    bf16 below, above;
    below.bits = static_cast<std::uint16_t>(bits >> 16);  // towards zero
    above.bits = static_cast<std::uint16_t>(below.bits + 1);
    const double down = std::abs(static_cast<double>(value) - below), up = std::abs(static_cast<double>(above) - value);
    ASSERT_EQ(std::abs(static_cast<double>(rounded) - value), std::min(down, up)) << value;
    if (down == up) {
      ASSERT_EQ(bf16(value).bits & 1, 0) << value;
    }
  }
}

TEST(Bf16, NanStaysNanAndOverflowIsInfinite) {
  EXPECT_TRUE(std::isnan(round_trip(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(round_trip(-std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(round_trip(std::bit_cast<float>(0x7f800001u))));  // its payload is in the bits that go
  EXPECT_TRUE(std::isnan(round_trip(std::bit_cast<float>(0xff800001u))));
  EXPECT_TRUE(std::isnan(round_trip(std::bit_cast<float>(0x7fffffffu))));
  EXPECT_EQ(round_trip(kInf), kInf);
  EXPECT_EQ(round_trip(-kInf), -kInf);
  EXPECT_EQ(round_trip(std::numeric_limits<float>::max()), kInf);
  EXPECT_EQ(round_trip(std::numeric_limits<float>::lowest()), -kInf);
  EXPECT_EQ(round_trip(0x1.fep127f), 0x1.fep127f);  // the largest
}

TEST(Bf16, DenormalsAndZerosKeepTheirSign) {
  EXPECT_EQ(round_trip(0x1p-133f), 0x1p-133f);  // the smallest
  EXPECT_EQ(round_trip(0x1p-134f), 0);          // a tie with zero
  EXPECT_EQ(round_trip(0x1.8p-134f), 0x1p-133f);
  EXPECT_TRUE(std::signbit(round_trip(-0.0f)));
  EXPECT_TRUE(std::signbit(round_trip(-0x1p-140f)));
}

TEST(DType, SizesNamesAndSteps) {
  EXPECT_EQ(size_of(DType::f32), 4);
  EXPECT_EQ(size_of(DType::bf16), 2);
  EXPECT_EQ(size_of(DType::f64), 8);
  EXPECT_EQ(name_of(DType::bf16), "bf16");
  EXPECT_EQ(epsilon_of(DType::f32), std::numeric_limits<float>::epsilon());
  EXPECT_EQ(epsilon_of(DType::f64), std::numeric_limits<double>::epsilon());
  EXPECT_NE(round_trip(1 + static_cast<float>(epsilon_of(DType::bf16))), 1);
  EXPECT_EQ(round_trip(1 + static_cast<float>(epsilon_of(DType::bf16)) / 2), 1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    EXPECT_EQ(visit_dtype(dtype, []<class T>() { return static_cast<std::int64_t>(sizeof(T)); }), size_of(dtype));
    EXPECT_EQ(visit_dtype(dtype, []<class T>() { return kDTypeOf<T>; }), dtype);
  }
}

}  // namespace
}  // namespace isomer
