// What a layout string says of sequence-parallel training: the scheme and its inner ranks, the ring round which blocks
// pass between groups of them, and data-parallel copies of it all.
//
//   laga:4              4 inner ranks, which spread the heads
//   laga:4,ring:2       4 inner ranks, 2 outer groups
//   ring:8              8 outer groups of one rank, which keeps all heads; so are latent-gather and latent-ring
//   laga:4,ring:2,dp:2  2 data-parallel replicas of 8 ranks, each with sequences of its own
#pragma once

#include <string>

#include "sharding/layout.h"
#include "sharding/tokens.h"

namespace isomer {

struct SequenceLayout {
  std::string scheme;     // the innermost axis: "laga"
  std::string outer;      // the second axis: "ring", "latent-ring", or empty
  int inner_ranks = 1;    // ranks of an inner group, neighbours
  int outer_groups = 1;   // groups round which blocks pass
  int data_replicas = 1;  // outermost

  int sequence_ranks() const { return inner_ranks * outer_groups; }
  int num_ranks() const { return sequence_ranks() * data_replicas; }
};

/// True for schemes in which a rank keeps all heads of its tokens: ring, latent-gather, latent-ring.
bool keeps_all_heads(std::string_view scheme);

/// `layout` where each axis has its size: the one that says none gets what the others leave of `num_ranks`. Throws
/// std::invalid_argument if that does not come out even, more than one axis is without size, or the product of the axes
/// is not num_ranks. num_ranks 0: the product of the axes that have one, others 1.
Layout sized_layout(const Layout& layout, int num_ranks);

/// Throws std::invalid_argument for axes that don't belong together.
SequenceLayout sequence_layout(const Layout& layout, int num_ranks = 0);

/// Ranks of one sequence, and copies of them. An axis without size counts as 1.
int sequence_ranks_of(const Layout& layout);
int data_ranks_of(const Layout& layout);

/// Who owns which tokens of the sequences of one replica; every axis must have its size.
TokenShards token_shards_of(const Layout& layout, std::int64_t seq, std::int64_t batch);

}  // namespace isomer
