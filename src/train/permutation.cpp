#include "train/permutation.h"

#include <bit>

#include "core/error.h"

namespace isomer {

namespace {

constexpr int kFeistelRounds = 6;

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

std::int64_t permuted(std::int64_t index, std::int64_t count, std::uint64_t seed, std::uint64_t round) {
  if (index < 0 || index >= count) invalid_argument("permutation: element {} of {}", index, count);
  const int half_bits = (std::bit_width(static_cast<std::uint64_t>(count - 1)) + 1) / 2;
  const std::uint64_t half_mask = (std::uint64_t{1} << half_bits) - 1;
  const std::uint64_t key = mix(mix(seed + 0x9e3779b97f4a7c15) ^ (round + 0x632be59bd9b4e019));
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half_bits, right = value & half_mask;
    for (std::uint64_t i = 0; i < kFeistelRounds; ++i) {
      const std::uint64_t next = left ^ (mix(key + (i << 56) + right) & half_mask);
      left = right;
      right = next;
    }
    value = left << half_bits | right;
  } while (value >= static_cast<std::uint64_t>(count));
  return static_cast<std::int64_t>(value);
}

}  // namespace isomer
