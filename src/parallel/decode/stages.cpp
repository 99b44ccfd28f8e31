#include "parallel/decode/stages.h"

#include <limits>
#include <utility>

#include "kernels/dispatch.h"
#include "kernels/matmul.h"
#include "layers/gqa.h"
#include "layers/mla.h"

namespace isomer {

namespace {

/// [T, h, w] → [h, T, w].
Tensor by_head(const Tensor& t) { return t.transpose(0, 1); }

UpProjectionViews up_projections(const DecodeBlock& block, IndexRange heads) {
  return up_projection_views(block.model.config, block.weights().attention.kv_b_proj, heads);
}

/// Merging starts from nothing: out = 0, lse = −inf.
void clear_partial(RankContext& ctx, const Tensor& out, const Tensor& lse) {
  const OpCost cost{0, 0, static_cast<double>(out.nbytes() + lse.nbytes())};
  run_kernel(ctx, "clear partial attention", cost, [&] {
    visit_dtype(out.dtype(), [&]<class T>() {
      std::fill_n(out.data<T>(), out.numel(), T{});
      std::fill_n(lse.data<T>(), lse.numel(), static_cast<T>(-std::numeric_limits<float>::infinity()));
    });
  });
}

/// Up-projected keys and values of the rank's heads for latent rows, as the attention core takes them.
AttentionInputs explicit_inputs(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const CachedRows& rows) {
  const ModelConfig& c = block.model.config;
  const std::int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, d = c.kv_lora_rank;
  const Tensor kv = up_project_forward(ctx, block.attention_layer(), rows.keys.select(1, 0), {0, block.heads()},
                                       MemoryClass::workspace);
  AttentionInputs in{.q = q.slice(2, 0, n), .k = kv.slice(2, 0, n), .v = kv.slice(2, n, c.v_head_dim)};
  if (r > 0) {
    in.q_rope = q.slice(2, n, r);
    in.k_rope = rows.keys.slice(2, d, r);
  }
  return in;
}

AttentionInputs grouped_inputs(const Tensor& q, const CachedRows& rows) {
  return {.q = q, .k = rows.keys, .v = rows.values};
}

}  // namespace

void observe(RankContext& ctx, const DecodeBlock& block, std::string_view name, const Tensor& tensor) {
  ctx.observe(fmt::format("layer.{}.{}", block.index, name), tensor);
}

Tensor as_dtype(RankContext& ctx, std::string_view name, const Tensor& t, DType dtype) {
  if (t.dtype() == dtype) return t;
  Tensor converted = ctx.empty(name, MemoryClass::workspace, dtype, t.shape());
  copy(ctx, name, t, converted);
  return converted;
}

Projections project(RankContext& ctx, const DecodeBlock& block, const Tensor& x) {
  return project(ctx, block, block.attention_layer(), x);
}

Projections project(RankContext& ctx, const DecodeBlock& block, const AttentionLayer& layer, const Tensor& x) {
  if (block.is_latent()) {
    ProjectSaved saved;
    const Projected p = project_forward(ctx, layer, x, saved);
    observe(ctx, block, "q", p.q);
    observe(ctx, block, "new rows", p.latent);
    return {.q = p.q, .keys = p.latent.unflatten(1, {1, p.latent.size(1)}), .values = {}, .c = saved.c};
  }
  GqaProjectSaved dropped;
  const GqaProjected p = gqa_project_forward(ctx, layer, x, dropped);
  observe(ctx, block, "q", p.q);
  observe(ctx, block, "new keys", p.k);
  observe(ctx, block, "new values", p.v);
  return {.q = p.q, .keys = p.k, .values = p.v, .c = {}};
}

void store_rows(RankContext& ctx, const DecodeBlock& block, const Tensor& keys, const Tensor& values) {
  for (const StepSequence& s : block.step.sequences) {
    block.cache.store(ctx, block.index, s.sequence, s.positions.begin, keys.slice(0, s.first_row, s.positions.count),
                      values ? values.slice(0, s.first_row, s.positions.count) : Tensor());
  }
}

Tensor project_and_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& x) {
  const Projections p = project(ctx, block, x);
  store_rows(ctx, block, p.keys, p.values);
  return p.q;
}

Tensor absorb(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const LatentColumns& columns,
              std::int64_t first_head) {
  const std::int64_t n = block.model.config.qk_nope_head_dim, rope = columns.rope.count;
  std::int64_t width = 0;
  for (const IndexRange& range : columns.latent) width += range.count;
  Tensor absorbed = ctx.empty("q absorbed", MemoryClass::workspace, q.dtype(), {q.size(0), q.size(1), width + rope});
  std::int64_t to = 0;
  for (const IndexRange& range : columns.latent) {
    if (range.count == 0) continue;
    const Tensor w_uk = up_projections(block, {first_head, q.size(1)}).w_uk.slice(2, range.begin, range.count);
    matmul(ctx, "absorb q", by_head(q.slice(2, 0, n)), w_uk, by_head(absorbed.slice(2, to, range.count)));
    to += range.count;
  }
  if (rope > 0) {
    copy(ctx, "concatenate q_pe", q.slice(2, n + columns.rope.begin, rope), absorbed.slice(2, width, rope));
  }
  return absorbed;
}

Tensor values_of(RankContext& ctx, const DecodeBlock& block, const Tensor& core, IndexRange latent,
                 std::int64_t first_head) {
  Tensor out =
      ctx.empty("o", MemoryClass::workspace, core.dtype(), {core.size(0), core.size(1), block.model.config.v_head_dim});
  const Tensor w_uv = up_projections(block, {first_head, core.size(1)}).w_uv.slice(2, latent.begin, latent.count);
  matmul(ctx, "W_UV õ", by_head(core), w_uv.transpose(1, 2), by_head(out));
  return out;
}

Tensor absorb(RankContext& ctx, const DecodeBlock& block, const Tensor& q, std::int64_t first_head) {
  if (!block.is_latent()) return q;
  const ModelConfig& c = block.model.config;
  return absorb(ctx, block, q, {{{0, c.kv_lora_rank}}, {0, c.qk_rope_head_dim}}, first_head);
}

Tensor values_of(RankContext& ctx, const DecodeBlock& block, const Tensor& core, std::int64_t first_head) {
  return block.is_latent() ? values_of(ctx, block, core, {0, block.model.config.kv_lora_rank}, first_head) : core;
}

PartialAttention attend_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& q) {
  return attend_cache(ctx, block, q, block.step.sequences);
}

PartialAttention attend_cache(RankContext& ctx, const DecodeBlock& block, const Tensor& q,
                              std::span<const StepSequence> sequences) {
  const Tensor keys = block.cache.keys(block.index), values = block.cache.values(block.index);
  const DType dtype = keys.dtype();
  const Tensor queries = as_dtype(ctx, "q in the cache's type", q, dtype);
  const Tensor out = ctx.empty("partial o", MemoryClass::workspace, dtype, {q.size(0), q.size(1), values.size(2)});
  const Tensor lse = ctx.empty("partial lse", MemoryClass::workspace, statistic_dtype(dtype), {q.size(1), q.size(0)});
  for (const StepSequence& s : sequences) {
    AttentionInputs in{.q = queries, .k = keys, .v = values, .scale = softmax_scale(block.model.config)};
    in.query_runs = {{.row = s.first_row, .length = s.positions.count, .position = s.positions.begin}};
    in.key_runs = block.cache.packed_runs(s.sequence, s.positions.begin);
    const auto new_runs = block.cache.runs(s.sequence, s.positions.begin, s.positions.end());
    in.key_runs.insert(in.key_runs.end(), new_runs.begin(), new_runs.end());
    fused_attention_forward(ctx, in, out, lse);
  }
  observe(ctx, block, "partial o", out);
  observe(ctx, block, "partial lse", lse);
  return {as_dtype(ctx, "partial o in the activations' type", out, q.dtype()), lse};
}

CachedRows load_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence, IndexRange positions) {
  const CacheOptions& cache = block.cache.options();
  const DType dtype = block.dtype();
  CachedRows rows;
  std::int64_t count = 0;
  for (const IndexRange& range : cache.shards.ranges(cache.slice, positions.begin, positions.end())) {
    rows.runs.push_back({.row = count, .length = range.count, .position = range.begin});
    count += range.count;
  }
  const auto make = [&](std::string_view name, std::int64_t width) {
    return ctx.empty(name, MemoryClass::workspace, dtype, {count, cache.row.num_heads, width});
  };
  rows.keys = make("prefix keys", cache.row.key_width);
  if (!cache.row.values_are_key_parts) rows.values = make("prefix values", cache.row.value_width);
  block.cache.load(ctx, block.index, sequence.sequence, positions.begin, positions.end(), rows.keys, rows.values);
  return rows;
}

PartialAttention attend_prefix(RankContext& ctx, const DecodeBlock& block, const Tensor& q, const RowSource& source) {
  const DType dtype = q.dtype(), wide = statistic_dtype(dtype);
  const std::int64_t heads = q.size(1), width = block.model.config.value_head_dim();
  const Tensor sum = ctx.empty("merged o", MemoryClass::workspace, wide, {q.size(0), heads, width});
  const Tensor lse = ctx.empty("merged lse", MemoryClass::workspace, wide, {heads, q.size(0)});
  clear_partial(ctx, sum, lse);
  for (const StepSequence& s : block.step.sequences) {
    const Tensor mine = q.slice(0, s.first_row, s.positions.count);
    const Tensor out = ctx.empty("partial o", MemoryClass::workspace, dtype, {mine.size(0), heads, width});
    const Tensor out_lse = ctx.empty("partial lse", MemoryClass::workspace, wide, {heads, mine.size(0)});
    for (std::int64_t begin = 0; begin < s.positions.end(); begin += kPrefixBlock) {
      const CachedRows rows = source(s, {begin, std::min(kPrefixBlock, s.positions.end() - begin)});
      AttentionInputs in = block.is_latent() ? explicit_inputs(ctx, block, mine, rows) : grouped_inputs(mine, rows);
      in.scale = softmax_scale(block.model.config);
      in.query_runs = {{.row = 0, .length = s.positions.count, .position = s.positions.begin}};
      in.key_runs = rows.runs;
      fused_attention_forward(ctx, in, out, out_lse);
      merge_attention(ctx, sum.slice(0, s.first_row, s.positions.count), lse.slice(1, s.first_row, s.positions.count),
                      out, out_lse);
    }
  }
  return {as_dtype(ctx, "o", sum, dtype), lse};
}

Tensor join_heads(RankContext& ctx, const DecodeBlock& block, const Tensor& attention, const Tensor& x) {
  return join_heads(ctx, block, block.weights().attention, attention, x);
}

Tensor join_heads(RankContext& ctx, const DecodeBlock& block, const AttentionWeights& w, const Tensor& attention,
                  const Tensor& x) {
  Tensor y = ctx.empty("y", MemoryClass::workspace, x.dtype(), x.shape());
  observe(ctx, block, "o", attention);
  matmul(ctx, "o_proj", attention.flatten(1, 2), w.o_proj.transpose(0, 1), y);
  block.comm.all_reduce("attention output", y);
  if (w.o_bias) add_bias(ctx, "o bias", w.o_bias, y);
  add_residual(ctx, block, y, x);
  return y;
}

void add_residual(RankContext& ctx, const DecodeBlock& block, const Tensor& y, const Tensor& x) {
  if (const double scale = block.model.config.residual_scale(); scale != 1) {
    scaled_sum(ctx, "residual scale", y, Tensor(), scale, y);
  }
  add(ctx, "residual", y, x, y);
  observe(ctx, block, "y", y);
}

}  // namespace isomer
