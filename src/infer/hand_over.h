// Moving a sequence's cache between two groups of ranks, which may lie under different layouts: what separates prefill
// from decode. Every rank computes from the two layouts alone who has what and who needs it (rank_cache_of), so that no
// rank asks another.
#pragma once

#include <vector>

#include "parallel/decode/step_scheme.h"

namespace isomer {

/// One group: ranks [first_rank, first_rank + layout.devices()) of a communicator.
struct CacheGroup {
  DecodeLayout layout;
  int first_rank = 0;

  int end_rank() const { return first_rank + layout.devices(); }
  bool has(int rank) const { return rank >= first_rank && rank < end_rank(); }
};

/// This rank's cache and the sequence's id in it; none where it is not in the group.
struct CacheSequence {
  KvCache* cache = nullptr;
  int sequence = 0;
};

/// What one rank sends another of every position that both have: units of a row, columns (latent attention) or KV
/// heads, in order of the receiver's cache.
struct CachePiece {
  int from = 0, to = 0;  // ranks of the communicator
  std::vector<IndexRange> units;
};
/// Who sends what of the positions of slice `slice` of `from`. A rank that needs what it has takes its own; copies of
/// the same are taken in turn.
std::vector<CachePiece> hand_over_pieces(const ModelConfig& config, const CacheGroup& from, int slice,
                                         const CacheGroup& to);

/// Copies positions [0, length) of a sequence from one group's caches to the other's, which must have room for them:
/// the receiving sequence grows from nothing. Collective over `comm`, which has both groups. A layer and a block of
/// positions at a time, by an all-to-all, in the sender's type; rounded to the receiver's.
void hand_over_cache(RankContext& ctx, Communicator& comm, const ModelConfig& config, std::int64_t length,
                     const CacheGroup& from, const CacheSequence& source, const CacheGroup& to,
                     const CacheSequence& target);

/// Why one group can't fill another's cache, or both don't make up a world of so many ranks; empty if they can.
std::string why_hand_over_unfit(const ModelConfig& config, const CacheGroup& from, const CacheGroup& to, int num_ranks,
                                const TplaModel* tpla = nullptr);

}  // namespace isomer
