// Closed forms of what one attention block costs a rank under a training scheme, beside the bytes of scheme_bytes.h:
// FLOPs, messages, what is saved for the backward, and what stands in the core's backward. Fused core, lean memory.
// Tests hold all of it equal to dry runs of the schemes themselves.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cost/scheme_bytes.h"

namespace isomer {

struct SchemeWork {
  double flops_forward = 0, flops_backward = 0;       // recomputation counts in the backward
  int exchanges_forward = 0, exchanges_backward = 0;  // collectives inside a group, or of all ranks
  int passes_forward = 0, passes_backward = 0;        // tensors sent to the next group
  std::int64_t messages = 0;                          // forward and backward
  std::int64_t saved_bytes =
      0;  // at the end of the forward; several ranks (alone, nothing is copied and less is saved)
  /// Bytes of the block's tensors that stand while the core's backward runs: saved, gradients, communication buffers.
  /// The kernel's own scratch is not in it. A lower bound of the peak: equal to it wherever attention is wide against
  /// the hidden state, as in most published models; in others an earlier or later moment may take more.
  std::int64_t core_backward_bytes = 0;
};

/// What the core and the up-projections of a scheme are made of on one rank.
struct SchemeCore {
  bool absorbed = false;
  std::int64_t heads = 0, kv_heads = 0;  // of the rank
  std::int64_t key_width = 0, value_width = 0;
  double share_of_pairs = 1;  // of the query–key pairs of all tokens
  std::int64_t up_projected_heads = 0;
  double up_projected = 0;          // rows × heads that meet W_UK and W_UV in the forward
  double up_projected_again = 0;    // and once more in the backward, to rebuild keys and values
  double up_projected_in_core = 0;  // as part of the core, so done again where that is recomputed
};
SchemeCore scheme_core(const SchemeCase& block, int rank);

/// Layouts without sizes that the planner prices, for one kind of attention: "laga", "laga,kv=strided",
/// "explicit,ring".
const std::vector<std::string_view>& schemes_with_work(AttentionKind kind = AttentionKind::mla);

/// Of `rank`, any option and recomputation of the schemes included. Throws std::invalid_argument for a scheme without
/// closed forms.
SchemeWork scheme_work(const SchemeCase& block, int rank);

}  // namespace isomer
