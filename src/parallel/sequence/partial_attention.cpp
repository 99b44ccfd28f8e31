#include "parallel/sequence/partial_attention.h"

#include "kernels/elementwise.h"
#include "parallel/sequence/heads.h"

namespace isomer {

namespace {

/// The queries that see any key of a part, and the keys that any of those sees.
struct VisiblePart {
  IndexRange query_rows;                  // the last rows of the queries
  std::vector<IndexRange> queries, keys;  // positions; the keys are the first of the part's
};

VisiblePart visible_part(const SequenceBlock& block, const std::vector<IndexRange>& queries,
                         const std::vector<IndexRange>& keys) {
  VisiblePart part;
  if (queries.empty() || keys.empty()) return part;
  const std::int64_t first_key = keys.front().begin, last_query = queries.back().end() - 1;
  std::int64_t hidden = 0, seeing = 0;
  for (const IndexRange& range : queries) {
    const std::int64_t begin = std::clamp(first_key, range.begin, range.end());
    hidden += begin - range.begin;
    if (begin < range.end()) part.queries.push_back({begin, range.end() - begin});
    seeing += range.end() - begin;
  }
  for (const IndexRange& range : keys) {
    const std::int64_t end = std::clamp(last_query + 1, range.begin, range.end());
    if (end > range.begin) part.keys.push_back({range.begin, end - range.begin});
  }
  part.query_rows = {hidden * block.tokens.batch, seeing * block.tokens.batch};
  return part;
}

AttentionInputs inputs_of(const SequenceBlock& block, const PlacedQueries& queries, const PlacedKeys& keys,
                          const VisiblePart& part) {
  const auto rows = [&](const Tensor& t) {
    return t ? t.slice(0, part.query_rows.begin, part.query_rows.count) : Tensor();
  };
  return {.q = rows(queries.q),
          .k = keys.k,
          .v = keys.v,
          .q_rope = rows(queries.q_rope),
          .k_rope = keys.k_rope,
          .query_runs = runs_of(block, part.queries),
          .key_runs = runs_of(block, part.keys),
          .scale = softmax_scale(block.layer.config)};
}

}  // namespace

bool sees_any(const std::vector<IndexRange>& queries, const std::vector<IndexRange>& keys) {
  return !queries.empty() && !keys.empty() && queries.back().end() > keys.front().begin;
}

void MergedAttention::begin(const PlacedKeys& keys) {
  const VisiblePart part = visible_part(block_, queries_.positions, keys.positions);
  const std::int64_t rows = queries_.q.size(0), heads = queries_.q.size(1);
  ISOMER_CHECK(part.query_rows.count == rows, "the first part of the keys is seen by {} of {} query rows",
               part.query_rows.count, rows);
  const DType dtype = queries_.q.dtype();
  out_ = ctx_.empty("core output", MemoryClass::saved, dtype, {rows, heads, keys.v.size(2)});
  lse_ = ctx_.empty("lse", MemoryClass::saved, statistic_dtype(dtype), {heads, rows});
  fused_attention_forward(ctx_, inputs_of(block_, queries_, keys, part), out_, lse_);
}

void MergedAttention::add(const PlacedKeys& keys) {
  if (!out_) return begin(keys);
  if (!sees_any(queries_.positions, keys.positions)) return;
  const VisiblePart part = visible_part(block_, queries_.positions, keys.positions);
  const std::int64_t heads = out_.size(1), rows = part.query_rows.count;
  const DType dtype = queries_.q.dtype(), sum_dtype = statistic_dtype(dtype);
  if (out_.dtype() != sum_dtype) {
    const Tensor sum = ctx_.empty("core output sum", MemoryClass::workspace, sum_dtype, out_.shape());
    copy(ctx_, "widen core output", out_, sum);
    out_ = sum;
  }
  const Tensor partial = ctx_.empty("partial output", MemoryClass::workspace, dtype, {rows, heads, out_.size(2)});
  const Tensor partial_lse = ctx_.empty("partial lse", MemoryClass::workspace, sum_dtype, {heads, rows});
  fused_attention_forward(ctx_, inputs_of(block_, queries_, keys, part), partial, partial_lse);
  merge_attention(ctx_, out_.slice(0, part.query_rows.begin, rows), lse_.slice(1, part.query_rows.begin, rows), partial,
                  partial_lse);
}

CoreSaved MergedAttention::finish() {
  ISOMER_CHECK(out_.defined(), "attention over no part of the keys");
  if (out_.dtype() != queries_.q.dtype()) {
    const Tensor sum = std::move(out_);
    out_ = ctx_.empty("core output", MemoryClass::saved, queries_.q.dtype(), sum.shape());
    copy(ctx_, "round core output", sum, out_);
  }
  ctx_.observe("core output", out_);
  ctx_.observe("core lse", lse_);
  CoreSaved saved;
  saved.out = std::move(out_);
  saved.lse = std::move(lse_);
  return saved;
}

void attention_part_backward(RankContext& ctx, const SequenceBlock& block, const PlacedQueries& queries,
                             const PlacedKeys& keys, const CoreSaved& core, const Tensor& dout,
                             const PartGradients& gradients) {
  if (!sees_any(queries.positions, keys.positions)) return;
  const VisiblePart part = visible_part(block, queries.positions, keys.positions);
  const auto rows = [&](const Tensor& t) {
    return t ? t.slice(0, part.query_rows.begin, part.query_rows.count) : Tensor();
  };
  fused_attention_backward(ctx, inputs_of(block, queries, keys, part), rows(core.out),
                           core.lse.slice(1, part.query_rows.begin, part.query_rows.count), rows(dout),
                           {.dq = rows(gradients.dq),
                            .dk = gradients.dk,
                            .dv = gradients.dv,
                            .dq_rope = rows(gradients.dq_rope),
                            .dk_rope = gradients.dk_rope,
                            .accumulate = true});
}

Tensor rounded(RankContext& ctx, std::string_view name, const Tensor& sum, DType dtype) {
  if (sum.dtype() == dtype) return sum;
  Tensor result = ctx.empty(name, MemoryClass::workspace, dtype, sum.shape());
  copy(ctx, "round sum", sum, result);
  return result;
}

}  // namespace isomer
