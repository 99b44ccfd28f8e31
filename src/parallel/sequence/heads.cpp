#include "parallel/sequence/heads.h"

namespace isomer {

std::vector<TokenRun> whole_sequences(const SequenceBlock& block) {
  std::vector<TokenRun> runs;
  for (std::int64_t b = 0; b < block.tokens.batch; ++b) {
    runs.push_back({.row = b,
                    .row_stride = block.tokens.batch,
                    .length = block.tokens.seq,
                    .position = block.first_position,
                    .segment = static_cast<int>(b)});
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
          .query_runs = whole_sequences(block),
          .key_runs = whole_sequences(block),
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
