// What crosses the wire inside an inner group: tokens for heads and back, rows gathered, sums scattered. Tensors are
// [rows, heads, width] or [rows, width]; "local" has the rank's T tokens and all heads, "by heads" the S' rows of the
// group (all tokens, where there is one group) and the rank's h/P heads, P the inner ranks. With one inner rank each is
// the identity and nothing is copied. What passes round between groups is in ring_pass.h.
#pragma once

#include <string_view>

#include "comm/communicator.h"
#include "parallel/sequence/scheme.h"

namespace isomer {

/// [T, h, w] → [S', h/P, w] (all-to-all).
Tensor tokens_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                       MemoryClass memory_class);
/// The same for heads that are no contiguous parts of one tensor: to_rank[i] [T, m, w] is what inner rank i gets of
/// this rank's tokens; [S', m, w]. One inner rank: to_rank[0] itself.
Tensor views_to_heads(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                      const std::vector<Tensor>& to_rank, MemoryClass memory_class);
/// [S', h/P, w] → [T, h, w] (all-to-all).
Tensor heads_to_tokens(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& by_heads,
                       MemoryClass memory_class);
/// [T, w] → [S', w] (all-gather).
Tensor gather_rows(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& local,
                   MemoryClass memory_class);
/// [S', w] partial sums of every rank → [T, w], the sum for the rank's tokens (reduce-scatter).
Tensor scatter_sum_rows(RankContext& ctx, const SequenceBlock& block, std::string_view name, const Tensor& partial);

/// Rows of `group` where those of all groups follow one another (schemes in which a rank keeps all heads).
IndexRange rows_of_group(const SequenceBlock& block, int group);
/// [T, w] → [S·batch, w] over the outer groups, under way: `rows` may be read once `work` was waited for.
struct GatheredRows {
  Tensor rows;
  Work work;
};
GatheredRows issue_gather_over_groups(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                                      const Tensor& local, MemoryClass memory_class);
/// [S·batch, w] partial sums of every group → [T, w] (reduce-scatter).
Tensor scatter_sum_over_groups(RankContext& ctx, const SequenceBlock& block, std::string_view name,
                               const Tensor& partial);

}  // namespace isomer
