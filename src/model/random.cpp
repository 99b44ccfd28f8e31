#include "model/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <thread>

namespace isomer {

namespace {

constexpr int kBlockPairs = 256;                       // pairs a block: its arrays stay in the first-level cache
constexpr std::int64_t kThreadedElements = 1 << 20;    // below, starting a thread isn't worth it
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: splitmix64's step

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::uint64_t stream_key(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a of the name
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return mix(mix(seed + kGolden) ^ hash);
}

/// A polynomial, leading coefficient first.
template <class... Coefficients>
[[gnu::always_inline]] inline double horner(double x, double sum, Coefficients... rest) {
  ((sum = sum * x + rest), ...);
  return sum;
}

/// ln(u) for u in (0, 1): u = 2^e·m with m in [√½, √2), ln m = 2 atanh(t), t = (m−1)/(m+1), by its series up to t^17
/// (|t| < 0.1716: the rest is below 1e-15). Only + − × ÷ and integer operations, so that loops over it vectorise.
[[gnu::always_inline]] inline double log_unit(double u) {
  constexpr std::uint64_t kHalfRoot = 0x3fe6a09e667f3bcd;  // √½
  const auto offset = std::bit_cast<std::uint64_t>(u) - kHalfRoot;
  // The exponent is in [−54, 0]; add 2048 in the unused bits and let a double's mantissa carry it: no int64 → double.
  const auto exponent_bits = (offset >> 52 | 0x4330000000000000) ^ 0x800;
  const double exponent = std::bit_cast<double>(exponent_bits) - (0x1p52 + 2048);
  const double m = std::bit_cast<double>((offset & 0x000fffffffffffff) + kHalfRoot);
  const double t = (m - 1) / (m + 1);
  const double series = horner(t * t, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0);
  return exponent * 0x1.62e42fefa39efp-1 + 2 * t * series;
}

/// sin(x)/x and cos(x) from x², |x| ≤ π/4, by Taylor's series; the rest is below 1e-16.
[[gnu::always_inline]] inline double sin_series(double x2) {
  return horner(x2, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120,
                -1.0 / 6, 1.0);
}
[[gnu::always_inline]] inline double cos_series(double x2) {
  return horner(x2, 1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720,
                1.0 / 24, -0.5, 1.0);
}

struct Block {
  std::uint64_t bits[kBlockPairs];
  double values[2 * kBlockPairs];
};

/// Pairs first_pair … of a stream: 32 bits of the hash are the radius, 32 the angle.
[[gnu::always_inline]] inline void normal_block(std::uint64_t key, std::uint64_t first_pair, Block& block) {
  for (int i = 0; i < kBlockPairs; ++i)
    block.bits[i] = mix(key + (first_pair + static_cast<std::uint64_t>(i) + 1) * kGolden);
  for (int i = 0; i < kBlockPairs; ++i) {
    // 32 bits in the mantissa of 2^52 make a double without a conversion; + ½ keeps u off 0 and 1.
    const double radius_bits = std::bit_cast<double>(block.bits[i] >> 32 | 0x4330000000000000) - 0x1p52;
    const double radius = std::sqrt(-2 * log_unit((radius_bits + 0.5) * 0x1p-32));
    // The angle: the top two bits choose the quadrant, the other 30 the place inside it, in (−π/4, π/4).
    const double inside = std::bit_cast<double>((block.bits[i] & 0x3fffffff) | 0x4330000000000000) - 0x1p52;
    const double x = (inside + 0.5 - 0x1p29) * (0x1.921fb54442d18p+0 * 0x1p-30);
    const double x2 = x * x;
    const double sine = radius * x * sin_series(x2);
    const double cosine = radius * cos_series(x2);
    // Quadrant q: turn (cos, sin) by q·90°. Bit 30 swaps the two, bit 31 changes both signs.
    const std::uint64_t swap = -(block.bits[i] >> 30 & 1);
    const std::uint64_t sign = block.bits[i] << 32 & 0x8000000000000000;
    const auto c = std::bit_cast<std::uint64_t>(cosine), s = std::bit_cast<std::uint64_t>(sine);
    block.values[2 * i] = std::bit_cast<double>(((c & ~swap) | ((s ^ 0x8000000000000000) & swap)) ^ sign);
    block.values[2 * i + 1] = std::bit_cast<double>(((s & ~swap) | (c & swap)) ^ sign);
  }
}

using BlockFunction = void (*)(std::uint64_t, std::uint64_t, Block&);

void normal_block_baseline(std::uint64_t key, std::uint64_t first_pair, Block& block) {
  normal_block(key, first_pair, block);
}
#if defined(__x86_64__)
// The same operations on wider registers; without -mfma, so the same bits.
[[gnu::target("avx2")]] void normal_block_avx2(std::uint64_t key, std::uint64_t first_pair, Block& block) {
  normal_block(key, first_pair, block);
}
BlockFunction best_block_function() {
  return __builtin_cpu_supports("avx2") ? normal_block_avx2 : normal_block_baseline;
}
#else
BlockFunction best_block_function() { return normal_block_baseline; }
#endif

template <class T>
void fill(std::uint64_t key, std::int64_t begin, std::int64_t count, const NormalDistribution& distribution, T* out) {
  const BlockFunction block_function = best_block_function();
  Block block;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t index = begin + done;
    const std::int64_t first = index / 2 * 2;  // a block starts at any pair: values don't depend on where
    block_function(key, static_cast<std::uint64_t>(first / 2), block);
    const double* values = block.values + (index - first);
    const std::int64_t length = std::min<std::int64_t>(count - done, 2 * kBlockPairs - (index - first));
    for (std::int64_t i = 0; i < length; ++i)
      out[done + i] = static_cast<T>(distribution.mean + distribution.stddev * values[i]);
    done += length;
  }
}

}  // namespace

void fill_seeded(std::uint64_t seed, std::string_view name, std::int64_t begin, std::int64_t count,
                 const NormalDistribution& distribution, DType dtype, void* out) {
  ISOMER_CHECK(begin >= 0 && count >= 0, "elements {} to {} of '{}'", begin, begin + count, name);
  const auto key = stream_key(seed, name);
  visit_dtype(dtype, [&]<class T>() { fill(key, begin, count, distribution, static_cast<T*>(out)); });
}

void fill_seeded(std::uint64_t seed, std::string_view name, const NormalDistribution& distribution,
                 const Tensor& tensor) {
  if (tensor.shape_only()) return;
  ISOMER_CHECK(tensor.is_contiguous(), "'{}' of shape {} is a strided view", name, to_string(tensor.shape()));
  const std::int64_t count = tensor.numel();
  auto* out = static_cast<char*>(tensor.raw());
  const std::int64_t half = count < kThreadedElements ? count : count / 2;
  std::jthread other;
  if (half < count) {
    other = std::jthread([&, half] {
      fill_seeded(seed, name, half, count - half, distribution, tensor.dtype(), out + half * size_of(tensor.dtype()));
    });
  }
  fill_seeded(seed, name, 0, half, distribution, tensor.dtype(), out);
}

}  // namespace isomer
