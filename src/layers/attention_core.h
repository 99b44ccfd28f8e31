// The attention core as schemes use it: `eager` keeps its score matrices, as the papers' eager path does; `fused` is
// blockwise with an online softmax and recomputes in the backward.
#pragma once

#include <string_view>
#include <vector>

#include "core/rank_context.h"
#include "kernels/attention.h"

namespace isomer {

enum class AttentionCore : std::uint8_t { eager, fused };
std::string_view name_of(AttentionCore core);

/// What a core keeps for its backward.
struct CoreSaved {
  Tensor out;                         // [num_query_rows, num_heads, value_width]; kept by fused only
  Tensor lse;                         // fused: [num_heads, num_query_rows] float32
  std::vector<Tensor> probabilities;  // eager: one [num_heads, run length, run length] a query run
};

/// out [num_query_rows, num_heads, value_width]. With in.q_rope given, `eager` keeps two score products apart and adds
/// them; otherwise it has one product of whole keys. Eager wants one key run to each query run, of the same segment.
Tensor attention_core_forward(RankContext& ctx, AttentionCore core, const AttentionInputs& in, CoreSaved& saved);

/// Takes what was saved; its tensors go as soon as their last use is over.
void attention_core_backward(RankContext& ctx, AttentionCore core, const AttentionInputs& in, CoreSaved&& saved,
                             const Tensor& dout, const AttentionGradients& gradients);

}  // namespace isomer
