#include "parallel/sequence/heads.h"

namespace isomer {

std::vector<TokenRun> group_runs(const SequenceBlock& block) {
  const std::int64_t batch = block.tokens.batch;
  std::vector<TokenRun> runs;
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t passed = 0;
    for (const IndexRange& range : block.tokens.group_positions(block.group())) {
      runs.push_back({.row = passed * batch + b,
                      .row_stride = batch,
                      .length = range.count,
                      .position = block.first_position + range.begin,
                      .segment = static_cast<int>(b)});
      passed += range.count;
    }
  }
  return runs;
}

AttentionInputs whole_sequence_inputs(const SequenceBlock& block, Tensor q, Tensor k, Tensor v, Tensor q_rope,
                                      Tensor k_rope) {
  return {.q = std::move(q),
          .k = std::move(k),
          .v = std::move(v),
          .q_rope = std::move(q_rope),
          .k_rope = std::move(k_rope),
          .query_runs = group_runs(block),
          .key_runs = group_runs(block),
          .scale = softmax_scale(block.layer.config)};
}

Tensor concatenate_keys(RankContext& ctx, const Tensor& k_nope, const Tensor& k_pe, MemoryClass memory_class) {
  const std::int64_t heads = k_nope.size(1), n = k_nope.size(2), r = k_pe.size(1);
  Tensor k = ctx.empty("k", memory_class, k_nope.dtype(), {k_nope.size(0), heads, n + r});
  copy(ctx, "concatenate k_nope", k_nope, k.slice(2, 0, n));
  if (r > 0) copy(ctx, "concatenate k_pe", k_pe.broadcast(1, heads), k.slice(2, n, r));
  return k;
}

}  // namespace isomer
