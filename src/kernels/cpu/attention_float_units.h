// Products whose steps are single floats, over any vector set.
#pragma once

#include <cstdint>

namespace isomer {
namespace {

template <class Vectors>
struct FloatUnits : Vectors {
  using V = typename Vectors::V;
  using Unit = typename Vectors::Unit;
  static constexpr int kPack = 1;

  static V mul_add(V sum, V a, V b) { return Vectors::fma(a, b, sum); }
  /// dst[0, kLanes) = row[0, n), zeros beyond; `odd` belongs to paired steps.
  template <class Storage>
  static void interleave(const Storage* row, const Storage* /*odd*/, std::int64_t n, Unit* dst) {
    Vectors::store(dst, row == nullptr ? Vectors::zero() : Vectors::load_first(row, n));
  }
  /// Values of keys `key` (even) and key + 1 for vector v of a panel, as steps over keys.
  static void store_steps(Unit* steps, std::int64_t key, int v, V even, V odd) {
    Unit* at = steps + key * Vectors::kLanes * Vectors::kVectors + v * Vectors::kLanes;
    Vectors::store(at, even);
    Vectors::store(at + Vectors::kLanes * Vectors::kVectors, odd);
  }
  /// Values of adjacent columns in a row.
  static void store_cells(Unit* row, std::int64_t column, V x) { Vectors::store(row + column, x); }
};

}  // namespace
}  // namespace isomer
