#include "parallel/sequence/heads.h"

#include <algorithm>

namespace isomer {

namespace {

/// Ends of the documents of sequence `b`, increasing; the last is the sequence's.
std::vector<std::int64_t> document_ends(const SequenceBlock& block, std::int64_t b) {
  std::vector<std::int64_t> ends;
  if (!block.document_starts.empty()) {
    for (const std::int64_t start : block.document_starts.at(static_cast<std::size_t>(b))) {
      if (start > 0) ends.push_back(start);
    }
  }
  ends.push_back(block.tokens.seq);
  return ends;
}

}  // namespace

std::vector<TokenRun> runs_of(const SequenceBlock& block, const std::vector<IndexRange>& positions) {
  const std::int64_t batch = block.tokens.batch;
  std::vector<TokenRun> runs;
  int first_segment = 0;  // of the sequence
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto ends = document_ends(block, b);
    std::int64_t passed = 0;
    for (const IndexRange& range : positions) {
      std::int64_t begin = range.begin;
      for (std::size_t document = 0; document < ends.size() && begin < range.end(); ++document) {
        const std::int64_t end = std::min(ends[document], range.end());
        if (end <= begin) continue;
        runs.push_back({.row = (passed + begin - range.begin) * batch + b,
                        .row_stride = batch,
                        .length = end - begin,
                        .position = block.first_position + begin,
                        .segment = first_segment + static_cast<int>(document)});
        begin = end;
      }
      passed += range.count;
    }
    first_segment += static_cast<int>(ends.size());
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
          .query_runs = runs_of(block, block.tokens.group_positions(0)),
          .key_runs = runs_of(block, block.tokens.group_positions(0)),
          .scale = softmax_scale(block.layer.config)};
}

Tensor concatenate_keys(RankContext& ctx, const Tensor& k_nope, const Tensor& k_pe, MemoryClass memory_class) {
  const std::int64_t heads = k_nope.size(1), n = k_nope.size(2), r = k_pe.size(1);
  Tensor k = ctx.empty("k", memory_class, k_nope.dtype(), {k_nope.size(0), heads, n + r});
  copy(ctx, "concatenate k_nope", k_nope, k.slice(2, 0, n));
  if (r > 0) copy(ctx, "concatenate k_pe", k_pe.broadcast(1, heads), k.slice(2, n, r));
  return k;
}

KeysAndValues build_keys_values(RankContext& ctx, const SequenceBlock& block, const Tensor& latent,
                                FunctionScope& scope) {
  const auto& config = block.layer.config;
  const std::int64_t n = config.qk_nope_head_dim;
  Tensor kv = up_project_forward(ctx, block.layer, latent, block.my_heads(), MemoryClass::workspace);
  KeysAndValues result;
  result.k = concatenate_keys(ctx, kv.slice(2, 0, n), latent.slice(1, config.kv_lora_rank, config.qk_rope_head_dim),
                              MemoryClass::saved);
  const Tensor v = kv.slice(2, n, config.v_head_dim);
  result.v = ctx.empty("v", MemoryClass::saved, v.dtype(), v.shape());
  copy(ctx, "copy v", v, result.v);
  scope.release(std::move(kv));
  return result;
}

void up_projection_gradients(RankContext& ctx, const SequenceBlock& block, const Tensor& latent, Tensor dk, Tensor dv,
                             const Tensor& dlatent, BlockGradients& gradients) {
  const auto& config = block.layer.config;
  const std::int64_t n = config.qk_nope_head_dim, r = config.qk_rope_head_dim, v = config.v_head_dim;
  sum_heads(ctx, "dk_pe over heads", dk.slice(2, n, r), dlatent.slice(1, config.kv_lora_rank, r));
  // Only now: the columns of dk_nope would stand idle through the core's peak.
  const Tensor dkv =
      ctx.empty("d kv_b output", MemoryClass::workspace, latent.dtype(), {dk.size(0), dk.size(1), n + v});
  copy(ctx, "join dk_nope", dk.slice(2, 0, n), dkv.slice(2, 0, n));
  copy(ctx, "join dv", dv, dkv.slice(2, n, v));
  dk = dv = Tensor();
  up_project_backward(ctx, block.layer, latent, block.my_heads(), dkv, dlatent, gradients);
}

}  // namespace isomer
