// Orders that are functions of a seed: the same on every machine, any element without the ones before it.
#pragma once

#include <cstdint>

namespace isomer {

/// Where element `index` of [0, count) goes in the permutation that (seed, round) names: a Feistel network on the next
/// power of four, walked until it lands inside (Black and Rogaway 2002). Throws std::invalid_argument outside [0,
/// count).
std::int64_t permuted(std::int64_t index, std::int64_t count, std::uint64_t seed, std::uint64_t round);

}  // namespace isomer
