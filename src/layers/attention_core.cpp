#include "layers/attention_core.h"

#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace isomer {

std::string_view name_of(AttentionCore core) { return core == AttentionCore::eager ? "eager" : "fused"; }

namespace {

/// The rows of a run as [num_heads, run length, width].
Tensor run_by_head(const Tensor& t, const TokenRun& run) {
  return t.strided_slice(0, run.row, run.length, run.row_stride).transpose(0, 1);
}

/// Keys or values of query head groups: [num_kv_heads, length, width].
struct RunPair {
  TokenRun queries, keys;
};

std::vector<RunPair> run_pairs(const AttentionInputs& in) {
  std::vector<RunPair> pairs;
  for (const TokenRun& queries : in.query_runs) {
    const TokenRun* match = nullptr;
    for (const TokenRun& keys : in.key_runs) {
      if (keys.segment != queries.segment) continue;
      ISOMER_CHECK(match == nullptr, "eager attention takes one key run a segment; segment {} has more", keys.segment);
      match = &keys;
    }
    ISOMER_CHECK(match != nullptr, "eager attention: no key run of segment {}", queries.segment);
    pairs.push_back({queries, *match});
  }
  return pairs;
}

/// Calls body(query heads, kv head) for every group of query heads that share a key/value head.
template <class Body>
void for_head_groups(std::int64_t num_heads, std::int64_t num_kv_heads, Body&& body) {
  const std::int64_t group = num_heads / num_kv_heads;
  if (group == 1) return body(std::int64_t{0}, num_heads, std::int64_t{0}, num_kv_heads);
  for (std::int64_t kv = 0; kv < num_kv_heads; ++kv) body(kv * group, group, kv, std::int64_t{1});
}

/// [1, …] repeated for a group, or [group, …] as it is.
Tensor spread(const Tensor& kv_by_head, std::int64_t first, std::int64_t count, std::int64_t group) {
  const Tensor part = kv_by_head.slice(0, first, count);
  return count == group ? part : part.select(0, 0).broadcast(0, group);
}

/// scores[head] = q[head] · k[its kv head]ᵀ
void score_product(RankContext& ctx, std::string_view name, const Tensor& q, const Tensor& k, const Tensor& scores) {
  for_head_groups(q.size(0), k.size(0),
                  [&](std::int64_t head, std::int64_t group, std::int64_t kv, std::int64_t count) {
                    matmul(ctx, name, q.slice(0, head, group), spread(k, kv, count, group).transpose(1, 2),
                           scores.slice(0, head, group));
                  });
}

/// result[head] = p[head] · v[its kv head]
void value_product(RankContext& ctx, std::string_view name, const Tensor& p, const Tensor& v, const Tensor& result) {
  for_head_groups(
      p.size(0), v.size(0), [&](std::int64_t head, std::int64_t group, std::int64_t kv, std::int64_t count) {
        matmul(ctx, name, p.slice(0, head, group), spread(v, kv, count, group), result.slice(0, head, group));
      });
}

/// result[kv head] (+)= Σ_{its query heads, in order} p[head]ᵀ · x[head]
void transposed_product(RankContext& ctx, std::string_view name, const Tensor& p, const Tensor& x, const Tensor& result,
                        bool accumulate) {
  for_head_groups(
      p.size(0), result.size(0), [&](std::int64_t head, std::int64_t group, std::int64_t kv, std::int64_t count) {
        if (count == group) {
          matmul(ctx, name, p.transpose(1, 2), x, result, accumulate);
          return;
        }
        // Sums are float32: bfloat16 gradients are rounded once, when all query heads have added.
        const Tensor to = result.select(0, kv);
        const bool round = to.dtype() == DType::bf16;
        const Tensor sum = round ? ctx.empty("kv gradient sum", MemoryClass::workspace, DType::f32, to.shape()) : to;
        for (std::int64_t i = 0; i < group; ++i) {
          matmul(ctx, name, p.select(0, head + i).transpose(0, 1), x.select(0, head + i), sum, accumulate || i > 0);
        }
        if (round) copy(ctx, "round", sum, to);
      });
}

Tensor eager_probabilities(RankContext& ctx, const AttentionInputs& in, const RunPair& pair) {
  FunctionScope scope(ctx);
  const bool framework = ctx.memory_policy() == MemoryPolicy::framework_eager;
  const Shape shape{in.q.size(1), pair.queries.length, pair.keys.length};
  const auto matrix = [&](std::string_view name, MemoryClass memory_class) {
    return ctx.empty(name, memory_class, in.q.dtype(), shape);
  };
  Tensor scores =
      matrix(framework ? "scores" : "probabilities", framework ? MemoryClass::workspace : MemoryClass::saved);
  score_product(ctx, "scores", run_by_head(in.q, pair.queries), run_by_head(in.k, pair.keys), scores);
  Tensor rope_scores;
  if (in.q_rope) {
    rope_scores = matrix("rope scores", MemoryClass::workspace);
    score_product(ctx, "rope scores", run_by_head(in.q_rope, pair.queries), run_by_head(in.k_rope, pair.keys),
                  rope_scores);
  }
  const std::int64_t diagonal = pair.queries.position - pair.keys.position;
  if (framework) {
    Tensor scaled = matrix("scaled scores", MemoryClass::workspace);
    scaled_sum(ctx, "scale scores", scores, rope_scores, in.scale, scaled);
    scope.release(std::move(scores));
    if (rope_scores) scope.release(std::move(rope_scores));
    Tensor p = matrix("probabilities", MemoryClass::saved);
    softmax_forward(ctx, "softmax", scaled, 1.0, in.causal, diagonal, p);
    scope.release(std::move(scaled));
    return p;
  }
  if (rope_scores) {
    add(ctx, "add scores", scores, rope_scores, scores);
    rope_scores = Tensor();
  }
  softmax_forward(ctx, "softmax", scores, in.scale, in.causal, diagonal, scores);
  return scores;
}

Tensor eager_forward(RankContext& ctx, const AttentionInputs& in, CoreSaved& saved) {
  std::vector<Tensor> probabilities;
  Tensor out = ctx.empty("core output", MemoryClass::saved, in.q.dtype(), {in.q.size(0), in.q.size(1), in.v.size(2)});
  for (const RunPair& pair : run_pairs(in)) {
    probabilities.push_back(eager_probabilities(ctx, in, pair));
    value_product(ctx, "probabilities·V", probabilities.back(), run_by_head(in.v, pair.keys),
                  run_by_head(out, pair.queries));
  }
  saved.probabilities = std::move(probabilities);
  return out;
}

void eager_backward(RankContext& ctx, const AttentionInputs& in, CoreSaved&& saved, const Tensor& dout,
                    const AttentionGradients& g) {
  const bool framework = ctx.memory_policy() == MemoryPolicy::framework_eager;
  const auto pairs = run_pairs(in);
  ISOMER_CHECK(pairs.size() == saved.probabilities.size(), "{} runs, {} saved", pairs.size(),
               saved.probabilities.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const RunPair& pair = pairs[i];
    Tensor p = std::move(saved.probabilities[i]);
    saved.probabilities[i] = Tensor();
    const Tensor dout_run = run_by_head(dout, pair.queries);
    transposed_product(ctx, "dV", p, dout_run, run_by_head(g.dv, pair.keys), g.accumulate);
    Tensor dp = ctx.empty("d probabilities", MemoryClass::workspace, p.dtype(), p.shape());
    score_product(ctx, "d probabilities", dout_run, run_by_head(in.v, pair.keys), dp);
    Tensor ds = framework ? ctx.empty("d scores", MemoryClass::workspace, p.dtype(), p.shape()) : dp;
    softmax_backward(ctx, "softmax backward", p, dp, in.scale, ds);
    p = Tensor();
    dp = Tensor();
    value_product(ctx, "dQ", ds, run_by_head(in.k, pair.keys), run_by_head(g.dq, pair.queries));
    transposed_product(ctx, "dK", ds, run_by_head(in.q, pair.queries), run_by_head(g.dk, pair.keys), g.accumulate);
    if (in.q_rope) {
      value_product(ctx, "dQ rope", ds, run_by_head(in.k_rope, pair.keys), run_by_head(g.dq_rope, pair.queries));
      transposed_product(ctx, "dK rope", ds, run_by_head(in.q_rope, pair.queries), run_by_head(g.dk_rope, pair.keys),
                         g.accumulate);
    }
  }
}

}  // namespace

Tensor attention_core_forward(RankContext& ctx, AttentionCore core, const AttentionInputs& in, CoreSaved& saved) {
  ctx.observe("core q", in.q);
  ctx.observe("core k", in.k);
  ctx.observe("core v", in.v);
  if (in.q_rope) ctx.observe("core q rope", in.q_rope);
  if (in.k_rope) ctx.observe("core k rope", in.k_rope);
  if (core == AttentionCore::eager) {
    Tensor result = eager_forward(ctx, in, saved);
    ctx.observe("core output", result);
    return result;
  }
  const std::int64_t num_rows = in.q.size(0), num_heads = in.q.size(1);
  Tensor out = ctx.empty("core output", MemoryClass::saved, in.q.dtype(), {num_rows, num_heads, in.v.size(2)});
  Tensor lse = ctx.empty("lse", MemoryClass::saved, statistic_dtype(in.q.dtype()), {num_heads, num_rows});
  fused_attention_forward(ctx, in, out, lse);
  ctx.observe("core output", out);
  ctx.observe("core lse", lse);
  saved.out = out;
  saved.lse = lse;
  return out;
}

void attention_core_backward(RankContext& ctx, AttentionCore core, const AttentionInputs& in, CoreSaved&& saved,
                             const Tensor& dout, const AttentionGradients& gradients) {
  if (core == AttentionCore::eager) return eager_backward(ctx, in, std::move(saved), dout, gradients);
  const CoreSaved taken = std::move(saved);
  fused_attention_backward(ctx, in, taken.out, taken.lse, dout, gradients);
}

}  // namespace isomer
