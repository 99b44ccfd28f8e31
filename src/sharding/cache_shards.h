// Which rank caches which tokens of a sequence: a pure index map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sharding/tokens.h"

namespace isomer {

/// Positions of a sequence over slices, dealt round-robin in chunks by global position: the owner of position p is
/// ⌊p / chunk⌋ mod num_slices (model-math: Helix, step 5). Prefill and decode share the count, so that it never starts
/// anew. One slice has all: a cache that stands whole on every rank.
struct CacheShards {
  static constexpr std::int64_t kChunk = 16;
  int num_slices = 1;
  std::int64_t chunk = kChunk;

  int owner(std::int64_t position) const { return static_cast<int>(position / chunk % num_slices); }
  /// How many of the positions [0, length) a slice has; also the place of its first position ≥ length among its own.
  std::int64_t count(int slice, std::int64_t length) const {
    const std::int64_t round = chunk * num_slices;
    return length / round * chunk + std::clamp<std::int64_t>(length % round - slice * chunk, 0, chunk);
  }
  /// The place of a position among its owner's.
  std::int64_t place(std::int64_t position) const { return count(owner(position), position); }
  /// Positions of `slice` within [begin, end): maximal ranges, increasing.
  std::vector<IndexRange> ranges(int slice, std::int64_t begin, std::int64_t end) const {
    std::vector<IndexRange> found;
    if (num_slices == 1) {
      if (end > begin) found.push_back({begin, end - begin});
      return found;
    }
    const std::int64_t round = chunk * num_slices;
    for (std::int64_t first = begin / round * round + slice * chunk; first < end; first += round) {
      const std::int64_t from = std::max(begin, first), to = std::min(end, first + chunk);
      if (to > from) found.push_back({from, to - from});
    }
    return found;
  }
};

/// What one rank caches of a sequence: the positions of its slice, and of their rows a part. Latent attention: columns
/// of the row [ĉ | RoPE(k_pe)], which lie in the cache one behind the other, those of ĉ first. Grouped-query attention:
/// KV heads.
struct RankCache {
  CacheShards shards;
  int slice = 0;
  std::vector<IndexRange> columns;
  IndexRange kv_heads;
};

}  // namespace isomer
