#include "model/gguf/dequantise.h"

#include <array>
#include <cstring>

#include "core/error.h"
#include "model/file_dtype.h"

namespace isomer {

namespace {

using Byte = unsigned char;

float half_at(const Byte* at) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return half_to_float(bits);
}

float low(Byte byte) { return static_cast<float>(byte & 0xf); }
float high(Byte byte) { return static_cast<float>(byte >> 4); }

/// Q8_0: half d, int8 q[32]; element i is d·q[i].
void q8_0_block(const Byte* block, float* to) {
  const float d = half_at(block);
  for (int i = 0; i < 32; ++i) to[i] = d * static_cast<float>(static_cast<signed char>(block[2 + i]));
}

/// Q4_0: half d, 16 bytes; byte i has element i in its low and element i + 16 in its high half: d·(q − 8).
void q4_0_block(const Byte* block, float* to) {
  const float d = half_at(block);
  for (int i = 0; i < 16; ++i) {
    to[i] = (low(block[2 + i]) - 8) * d;
    to[i + 16] = (high(block[2 + i]) - 8) * d;
  }
}

/// Q4_1: half d, half m, 16 bytes as in Q4_0: d·q + m.
void q4_1_block(const Byte* block, float* to) {
  const float d = half_at(block), m = half_at(block + 2);
  for (int i = 0; i < 16; ++i) {
    const float a = low(block[4 + i]) * d, b = high(block[4 + i]) * d;
    to[i] = a + m;
    to[i + 16] = b + m;
  }
}

/// The j-th of eight scales and minima of 6 bits in 12 bytes: the first four of each stand in the low 6 bits of bytes
/// 0–3 and 4–7; of the others, bytes 8–11 have the low 4 bits (scale low, minimum high), and the two free bits of bytes
/// 0–3 and 4–7 their high 2.
struct ScaleAndMin {
  float scale, min;
};
ScaleAndMin scale_and_min(const Byte* packed, int j) {
  if (j < 4) return {static_cast<float>(packed[j] & 63), static_cast<float>(packed[j + 4] & 63)};
  const int scale = (packed[j + 4] & 0xf) | packed[j - 4] >> 6 << 4;
  const int min = packed[j + 4] >> 4 | packed[j] >> 6 << 4;
  return {static_cast<float>(scale), static_cast<float>(min)};
}

/// Q4_K: half d, half dmin, 12 bytes of scales and minima, 128 bytes. Eight groups of 32; groups 2p and 2p + 1 are the
/// low and high halves of bytes 32p…32p + 31: (d·scale)·q − dmin·min.
void q4_k_block(const Byte* block, float* to) {
  const float d = half_at(block), dmin = half_at(block + 2);
  for (int group = 0; group < 8; ++group) {
    const auto [scale, min] = scale_and_min(block + 4, group);
    const float step = d * scale, offset = dmin * min;
    const Byte* bytes = block + 16 + group / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const float product = step * (group % 2 == 0 ? low(bytes[i]) : high(bytes[i]));
      to[group * 32 + i] = product - offset;
    }
  }
}

/// Q6_K: 128 bytes of low 4 bits, 64 of high 2, int8 scales[16], half d. Two halves of 128 elements; in each, quarter k
/// (32 elements) has its low bits in bytes 32(k mod 2)… of the half's 64, low or high nibble by k div 2, and its high
/// bits at position 2k of the half's 32 bytes; a scale for every 16: d·scale·(q − 32).
void q6_k_block(const Byte* block, float* to) {
  const float d = half_at(block + 208);
  for (int half = 0; half < 2; ++half) {
    const Byte* low_bits = block + half * 64;
    const Byte* high_bits = block + 128 + half * 32;
    const Byte* scales = block + 192 + half * 8;
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 32; ++i) {
        const Byte byte = low_bits[k % 2 * 32 + i];
        const int q = (k < 2 ? byte & 0xf : byte >> 4) | (high_bits[i] >> (2 * k) & 3) << 4;
        const auto scale = static_cast<float>(static_cast<signed char>(scales[k * 2 + i / 16]));
        to[half * 128 + k * 32 + i] = d * scale * static_cast<float>(q - 32);
      }
    }
  }
}

template <class Block>
void each_block(GgufType type, const char* from, std::int64_t count, float* to, Block&& block) {
  const GgufBlock layout = block_of(type);
  const auto* at = reinterpret_cast<const Byte*>(from);
  for (std::int64_t i = 0; i < count; i += layout.elements, at += layout.bytes) block(at, to + i);
}

}  // namespace

void dequantise(GgufType type, const char* from, std::int64_t count, float* to) {
  ISOMER_CHECK(count % block_of(type).elements == 0, "{} elements of {}", count, block_of(type).name);
  switch (type) {
    case GgufType::f32: return convert_elements(FileDType::f32, from, count, DType::f32, to);
    case GgufType::f16: return convert_elements(FileDType::f16, from, count, DType::f32, to);
    case GgufType::bf16: return convert_elements(FileDType::bf16, from, count, DType::f32, to);
    case GgufType::q8_0: return each_block(type, from, count, to, q8_0_block);
    case GgufType::q4_0: return each_block(type, from, count, to, q4_0_block);
    case GgufType::q4_1: return each_block(type, from, count, to, q4_1_block);
    case GgufType::q4_k: return each_block(type, from, count, to, q4_k_block);
    case GgufType::q6_k: return each_block(type, from, count, to, q6_k_block);
  }
}

}  // namespace isomer
