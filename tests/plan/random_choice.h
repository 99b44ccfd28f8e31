// Seeded choices for tests over random layouts and shapes.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace isomer {

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(generator_);
  }
  bool coin() { return between(0, 1) == 1; }
  template <class T>
  const T& one_of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(between(0, std::ssize(list) - 1))];
  }

 private:
  std::mt19937 generator_;
};

}  // namespace isomer
