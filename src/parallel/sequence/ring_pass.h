// Blocks that pass round the outer groups, each rank to its successor, so that in as many steps as there are groups
// everybody has seen everybody's: the traffic of every ring scheme. The next block is under way while the present one
// is worked on.
//
//   forward    step 0: own block; step s: the block of group g − s; P − 1 hops a block
//   backward   the same blocks, and behind each the float32 sum of its gradient: block j's sum begins at rank j + 1 and
//              ends at rank j after P − 1 hops, the owner adding its own share last
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parallel/sequence/scheme.h"

namespace isomer {

/// Tensors that travel together, [rows of a group, …] each, with their names in the ledger.
struct RingBlock {
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
};

/// visit(tensors of the block, the group that owns it).
using RingVisit = std::function<void(const std::vector<Tensor>& tensors, int group)>;
void pass_round(RankContext& ctx, const SequenceBlock& block, const RingBlock& mine, const RingVisit& visit);

/// contribute(tensors, group, sums): adds this rank's share of the block's gradients to `sums`, float32 zeros shaped as
/// the tensors. Returns the sums over all groups for the rank's own block.
using RingContribution =
    std::function<void(const std::vector<Tensor>& tensors, int group, const std::vector<Tensor>& sums)>;
std::vector<Tensor> pass_round_backward(RankContext& ctx, const SequenceBlock& block, const RingBlock& mine,
                                        const RingContribution& contribute);

}  // namespace isomer
