// How the attention core's tasks are cut and scheduled. What is cut depends on shapes alone, so that results don't
// depend on the number of threads.
#pragma once

#include <vector>

#include "core/rank_context.h"
#include "kernels/attention.h"
#include "kernels/attention_problem.h"

namespace isomer {

/// Workspace of a forward pass whose keys are split (few columns, many keys); undefined tensors otherwise.
struct ForwardPlan {
  ForwardPlan(RankContext& ctx, const AttentionShape& shape, const AttentionBlockKernels& kernels);
  std::int64_t block_columns = 0;
  std::int64_t num_blocks = 0;  // column blocks a key/value head
  std::int64_t num_splits = 1;
  std::int64_t split_keys = 0;
  std::int64_t scratch_bytes = 0;
  Tensor partial_out;  // [kv heads · column blocks, splits, block columns, value_width]
  Tensor partial_lse;  // [kv heads · column blocks, splits, block columns]
};

/// Where a backward pass sums the gradients of keys. dk and dv of float32 are summed in place; otherwise there is one
/// sum for each thread. Where the columns of few key/value heads are cut into chunks for parallel work there is one for
/// each chunk, but for the first, which sums in place where the gradient is float32. dk_rope, shared by the heads, has
/// one for each group of heads.
struct BackwardPlan {
  BackwardPlan(RankContext& ctx, const AttentionShape& shape, const AttentionGradients& gradients,
               const AttentionBlockKernels& kernels);
  std::int64_t block_columns = 0;
  std::int64_t num_blocks = 0;
  std::int64_t num_groups = 0;  // of key/value heads; the heads of a group are done in turn by one task
  std::int64_t num_chunks = 1;  // of column blocks, interleaved
  std::int64_t scratch_bytes = 0;
  Tensor dk_sums[2];  // [slots, num_keys, width], undefined where summed in place
  Tensor dv_sums;
  bool slot_per_task = false;      // without chunks: the slot is the task's, else the thread's
  bool dk_first_in_place = false;  // with chunks: chunk 0 has no slot
  bool dv_first_in_place = false;
};

void run_attention_forward(RankContext& ctx, const AttentionProblem& problem, const AttentionBlockKernels& kernels,
                           const ForwardPlan& plan);
void run_attention_backward(RankContext& ctx, const AttentionProblem& problem, const AttentionBlockKernels& kernels,
                            const BackwardPlan& plan);

}  // namespace isomer
