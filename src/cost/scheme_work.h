// Closed forms of what one attention block costs a rank under a training scheme, beside the bytes of scheme_bytes.h:
// FLOPs, messages, what is saved for the backward, and what stands in the core's backward. Fused core, lean memory.
// Tests hold all of it equal to dry runs of the schemes themselves.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "model/config.h"
#include "sharding/tokens.h"

namespace isomer {

struct SchemeWork {
  double flops_forward = 0, flops_backward = 0;
  int exchanges_forward = 0, exchanges_backward = 0;  // collectives
  std::int64_t messages = 0;                          // forward and backward
  std::int64_t saved_bytes =
      0;  // at the end of the forward; several ranks (alone, nothing is copied and less is saved)
  /// Bytes of the block's tensors that stand while the core's backward runs: saved, gradients, communication buffers.
  /// The kernel's own scratch is not in it. This is the peak wherever attention is wider than the hidden state, as in
  /// the published models; in others an earlier or later moment may take more.
  std::int64_t core_backward_bytes = 0;
};

/// What the core and the up-projections of a scheme are made of on one rank.
struct SchemeCore {
  bool absorbed = false;
  std::int64_t key_width = 0, value_width = 0;
  std::int64_t up_projected_rows = 0, up_projected_heads = 0;  // that meet W_UK and W_UV
};
SchemeCore scheme_core(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens, int rank);

/// Schemes that have these forms.
const std::vector<std::string_view>& schemes_with_work();

/// Of `rank`. Throws std::invalid_argument for a scheme without closed forms.
SchemeWork scheme_work(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens, DType activations,
                       int rank);

}  // namespace isomer
