#include "layers/rope.h"

#include <cmath>
#include <numbers>
#include <stdexcept>

#include <gtest/gtest.h>

namespace isomer {
namespace {

// A handful of roundings in pow, exp and cos; the angle itself is exact to half an ulp, and so is the comparison.
constexpr double kTolerance = 64 * 0x1p-52;

RopeConfig yarn(double theta, double factor, double beta_fast, double beta_slow) {
  return {.theta = theta,
          .scaling = RopeScalingKind::yarn,
          .factor = factor,
          .original_max_position_embeddings = 4096,
          .beta_fast = beta_fast,
          .beta_slow = beta_slow,
          .mscale = 1,
          .mscale_all_dim = 1};
}

double unscaled(double theta, int pair, int rope_dim) { return std::pow(theta, -2.0 * pair / rope_dim); }

/// Checks that pairs up to `low` keep their frequency, that those from `high` on are interpolated, and the ramp
/// between.
void expect_ramp(const RopeConfig& rope, int low, int high) {
  const RopeFrequencies frequencies = rope_frequencies(rope, 64, 1);
  ASSERT_EQ(frequencies.inv_freq.size(), 32u);
  for (int i = 0; i < 32; ++i) {
    const double inv = unscaled(rope.theta, i, 64);
    const double ramp = i <= low ? 0 : i >= high ? 1 : static_cast<double>(i - low) / (high - low);
    const double expected = inv * (1 - ramp) + inv / rope.factor * ramp;
    EXPECT_NEAR(frequencies.inv_freq[static_cast<std::size_t>(i)] / expected, 1, kTolerance) << "pair " << i;
  }
}

TEST(Rope, WithoutScalingThetaGivesTheFrequencies) {
  const RopeFrequencies frequencies = rope_frequencies({.theta = 10000}, 8, 1);
  const std::vector<double> expected = {1, 0.1, 0.01, 0.001};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(frequencies.inv_freq[i] / expected[i], 1, kTolerance);
  EXPECT_EQ(frequencies.magnitude, 1);
}

TEST(Rope, YarnOfDeepSeekV3RampsFromPair10To23) { expect_ramp(yarn(1e4, 40, 32, 1), 10, 23); }

TEST(Rope, YarnOfKimiK2RampsFromPair19To20) { expect_ramp(yarn(5e4, 32, 1, 1), 19, 20); }

TEST(Rope, YarnMagnitudeIsTheRatioOfMscales) {
  RopeConfig rope = yarn(1e4, 40, 32, 1);
  EXPECT_EQ(rope_frequencies(rope, 64, 1).magnitude, 1);  // V3: both 1
  rope.mscale = 0.707;
  rope.mscale_all_dim = 0;  // absent: nothing to divide by
  EXPECT_NEAR(rope_frequencies(rope, 64, 1).magnitude, 0.1 * 0.707 * std::log(40.0) + 1, kTolerance);
  rope.mscale_all_dim = 1;
  EXPECT_NEAR(rope_frequencies(rope, 64, 1).magnitude, (0.0707 * std::log(40.0) + 1) / (0.1 * std::log(40.0) + 1),
              kTolerance);
  rope.factor = 1;
  EXPECT_EQ(rope_frequencies(rope, 64, 1).magnitude, 1);
}

TEST(Rope, YarnWhoseRampEndsWhereItBeginsIsAStep) {
  RopeConfig rope = yarn(1e4, 4, 1, 1);
  rope.original_max_position_embeddings = 7;  // dim(1) below pair 1 for r = 8, ⌊⌋ = 0 and ⌈⌉ = 1
  const RopeFrequencies frequencies = rope_frequencies(rope, 8, 1);
  EXPECT_EQ(frequencies.inv_freq[0], 1);
  EXPECT_NEAR(frequencies.inv_freq[1], 0.1 / 4, kTolerance);
  rope.original_max_position_embeddings = 100000;  // dim beyond r − 1: with r = 2 both ends are clamped to 1
  EXPECT_TRUE(std::isfinite(rope_frequencies(rope, 2, 1).inv_freq[0]));
}

TEST(Rope, LinearDividesPositions) {
  const RopeConfig rope = {.scaling = RopeScalingKind::linear, .factor = 8};
  const RopeTable scaled = rope_table(rope, 8, {800}, 4096);
  const RopeTable plain = rope_table({}, 8, {100}, 4096);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(scaled.cos[i], plain.cos[i], 100 * kTolerance);  // an angle of 100 carries 100 roundings of 1
    EXPECT_NEAR(scaled.sin[i], plain.sin[i], 100 * kTolerance);
  }
}

TEST(Rope, Llama3KeepsShortInterpolatesLongBlendsBetween) {
  const RopeConfig rope = {.theta = 500000,
                           .interleave = false,
                           .scaling = RopeScalingKind::llama3,
                           .factor = 8,
                           .original_max_position_embeddings = 8192,
                           .low_freq_factor = 1,
                           .high_freq_factor = 4};
  const RopeFrequencies frequencies = rope_frequencies(rope, 128, 131072);
  int kept = 0, blended = 0, interpolated = 0;
  for (int i = 0; i < 64; ++i) {
    const double inv = unscaled(5e5, i, 128);
    const double wavelength = 2 * std::numbers::pi / inv;
    const double ratio = frequencies.inv_freq[static_cast<std::size_t>(i)] / inv;
    if (wavelength < 8192.0 / 4) {
      EXPECT_NEAR(ratio, 1, kTolerance);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_NEAR(ratio, 1.0 / 8, kTolerance);
      ++interpolated;
    } else {
      const double smooth = (8192.0 / wavelength - 1) / 3;
      EXPECT_NEAR(ratio, (1 - smooth) / 8 + smooth, kTolerance);
      ++blended;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(blended, 0);
  EXPECT_GT(interpolated, 0);
}

TEST(Rope, LongropeChoosesItsFactorsByTheLengthOfTheRun) {
  const RopeConfig rope = {.interleave = false,
                           .scaling = RopeScalingKind::longrope,
                           .factor = 4,
                           .original_max_position_embeddings = 256,
                           .short_factor = {1, 2},
                           .long_factor = {3, 5}};
  const RopeFrequencies at_limit = rope_frequencies(rope, 4, 256);
  const RopeFrequencies beyond = rope_frequencies(rope, 4, 257);
  EXPECT_NEAR(at_limit.inv_freq[0], 1, kTolerance);
  EXPECT_NEAR(at_limit.inv_freq[1], 0.01 / 2, kTolerance);
  EXPECT_NEAR(beyond.inv_freq[0], 1.0 / 3, kTolerance);
  EXPECT_NEAR(beyond.inv_freq[1], 0.01 / 5, kTolerance);
  EXPECT_NEAR(at_limit.magnitude, std::sqrt(1 + std::log(4.0) / std::log(256.0)), kTolerance);
  EXPECT_EQ(at_limit.magnitude, beyond.magnitude);
}

TEST(Rope, TableHoldsOneRowPerPositionWithTheMagnitude) {
  RopeConfig rope = yarn(1e4, 40, 32, 1);
  rope.mscale_all_dim = 0;
  const double magnitude = 0.1 * std::log(40.0) + 1;
  const std::vector<std::int64_t> positions = {0, 70001, 3};
  const RopeTable table = rope_table(rope, 64, positions, 1 << 17);
  ASSERT_EQ(table.cos.size(), 3u * 32);
  const std::vector<double> inv_freq = rope_frequencies(rope, 64, 1 << 17).inv_freq;
  for (std::size_t row = 0; row < positions.size(); ++row) {
    for (std::size_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(positions[row]) * inv_freq[i];
      EXPECT_NEAR(table.cos[row * 32 + i], magnitude * std::cos(angle), kTolerance);
      EXPECT_NEAR(table.sin[row * 32 + i], magnitude * std::sin(angle), kTolerance);
    }
  }
}

TEST(Rope, WithoutRotationTheTableIsTheIdentity) {
  RopeConfig rope = yarn(1e4, 40, 32, 1);
  rope.mscale_all_dim = 0;  // its magnitude must not leak either
  rope.rotate = false;
  const RopeTable table = rope_table(rope, 6, {5, 90001}, 1 << 17);
  EXPECT_EQ(table.cos, std::vector<double>(6, 1.0));
  EXPECT_EQ(table.sin, std::vector<double>(6, 0.0));
}

TEST(Rope, WithoutARopePartTheTableIsEmpty) {
  const RopeTable table = rope_table(yarn(1e4, 40, 32, 1), 0, {1, 2, 3}, 4);
  EXPECT_TRUE(table.cos.empty());
  EXPECT_TRUE(table.sin.empty());
}

TEST(Rope, RefusesValuesThatNoScalingCanUse) {
  EXPECT_THROW(rope_frequencies({}, 7, 1), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({}, -2, 1), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({.theta = 0}, 8, 1), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({.scaling = RopeScalingKind::linear, .factor = 0}, 8, 1), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({.scaling = RopeScalingKind::yarn, .factor = 2}, 8, 1), std::invalid_argument);
  EXPECT_THROW(rope_frequencies({.scaling = RopeScalingKind::longrope,
                                 .original_max_position_embeddings = 64,
                                 .short_factor = {1, 1},
                                 .long_factor = {1, 1}},
                                8, 1),
               std::invalid_argument);
}

}  // namespace
}  // namespace isomer
