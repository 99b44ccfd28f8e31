// A long context without its prefill: cache rows made up from a seed. Whoever uses them says so in its output.
#pragma once

#include "infer/engine.h"

namespace isomer {

/// Appends `tokens` positions to each of some sequences, the i-th with seed + i; their rows are noise of standard
/// deviation 0.8, the same under every layout, number of ranks and dtype: an element depends on (seed, layer, position,
/// index in the whole row) alone and has eight bits, so that no dtype rounds it. Collective; throws as KvCache::grow
/// does.
void append_seeded_rows(RankContext& ctx, Engine& engine, std::span<const int> sequences, std::int64_t tokens,
                        std::uint64_t seed);

}  // namespace isomer
