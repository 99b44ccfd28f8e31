// The communicators of sequence-parallel training: one world split into data-parallel replicas, each a sequence spread
// over inner × outer ranks.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "sharding/sequence_layout.h"

namespace isomer {

/// A group of one rank has a communicator too; schemes ask for sizes, not for null.
struct SequenceGroups {
  std::shared_ptr<Communicator> sequence;    // all ranks of this replica: rank = group · inner ranks + index
  std::shared_ptr<Communicator> inner;       // neighbours; spread the heads of their group's tokens
  std::shared_ptr<Communicator> outer;       // ranks of equal index in their groups; blocks pass round it
  std::shared_ptr<Communicator> same_heads;  // as outer, over all replicas: hold gradients of the same heads
  int data_rank = 0;                         // which replica
  int data_size = 1;                         // how many
};

/// Splits ctx.comm(); collective over all ranks, dry ones too. Throws std::invalid_argument if the layout's axes don't
/// make ctx.world_size() ranks.
SequenceGroups make_sequence_groups(RankContext& ctx, const Layout& layout);

}  // namespace isomer
