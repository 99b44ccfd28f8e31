#include "parallel/sequence/heads.h"

#include <algorithm>

namespace isomer {

namespace {

/// Parts of [range) at the borders of documents; document i begins at begins[i].
template <class Body>
void for_document_parts(const IndexRange& range, const std::vector<std::int64_t>& begins, Body&& body) {
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const std::int64_t end = i + 1 < begins.size() ? begins[i + 1] : range.end();
    const std::int64_t from = std::max(range.begin, begins[i]), to = std::min(range.end(), end);
    if (from < to) body(static_cast<int>(i), IndexRange{from, to - from});
  }
}

}  // namespace

std::vector<TokenRun> group_runs(const SequenceBlock& block) {
  static const std::vector<std::int64_t> kOneDocument = {0};
  const std::int64_t batch = block.tokens.batch;
  std::vector<TokenRun> runs;
  int first_segment = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto& begins = block.documents.empty() ? kOneDocument : block.documents[static_cast<std::size_t>(b)];
    std::int64_t passed = 0;
    for (const IndexRange& range : block.tokens.group_positions(block.group())) {
      for_document_parts(range, begins, [&](int document, const IndexRange& part) {
        runs.push_back({.row = (passed + part.begin - range.begin) * batch + b,
                        .row_stride = batch,
                        .length = part.count,
                        .position = block.first_position + part.begin,
                        .segment = first_segment + document});
      });
      passed += range.count;
    }
    first_segment += static_cast<int>(begins.size());
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
