#include "eval/sharded_forward.h"

#include <cmath>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "layers/ffn.h"
#include "layers/head.h"
#include "layers/mla.h"

namespace isomer {

namespace {

/// [T, h, w] → [h, T, w].
Tensor by_head(const Tensor& t) { return t.transpose(0, 1); }

/// Rows of each sequence: the first ones that prefill computes, and the others.
struct Runs {
  std::vector<TokenRun> exact, sharded, all;
  std::int64_t num_rows = 0;
};

Runs runs_of(std::span<const ScoredSequence> sequences) {
  Runs runs;
  int segment = 0;
  for (const ScoredSequence& s : sequences) {
    const auto length = static_cast<std::int64_t>(s.ids.size()), rest = length - s.exact_rows;
    const std::int64_t row = runs.num_rows;
    runs.all.push_back({.row = row, .length = length, .position = 0, .segment = segment});
    if (s.exact_rows > 0) {
      runs.exact.push_back({.row = row, .length = s.exact_rows, .position = 0, .segment = segment});
    }
    if (rest > 0) {
      runs.sharded.push_back({.row = row + s.exact_rows, .length = rest, .position = s.exact_rows, .segment = segment});
    }
    runs.num_rows += length;
    ++segment;
  }
  return runs;
}

void check_model(const ShardedModel& m) {
  check_tpla_options(m.options, m.config);
  const auto layers = static_cast<std::size_t>(m.config.num_hidden_layers);
  const bool gla = m.sharding == LatentSharding::gla;
  if (!gla && m.layers.size() != layers) {
    invalid_argument("{}: scalars of {} layers for a model of {}", m.config.name, m.layers.size(), layers);
  }
  if (gla && (m.config.num_attention_heads % m.options.num_shards != 0 || m.options.shared_columns != 0)) {
    invalid_argument("gla: {} groups, {} heads, {} shared columns: groups must divide the heads, and share nothing",
                     m.options.num_shards, m.config.num_attention_heads, m.options.shared_columns);
  }
  if (m.sharding == LatentSharding::whole_softmax && m.options.shared_columns != 0) {
    invalid_argument("softmax=whole: {} shared columns: it looks at the RMS of shards that share none",
                     m.options.shared_columns);
  }
  if (m.weights.norm.dtype() == DType::bf16) {
    invalid_argument("a sharded latent is evaluated in float32 on one rank; take --dtype f32");
  }
}

/// 1/RMS of row t as shard `i` estimates it: from its own and the shared columns.
template <class T>
double inverse_rms(const ShardedModel& m, std::int64_t layer, int i, const T* c) {
  const std::int64_t d = m.config.kv_lora_rank;
  const TplaRange own = m.options.shard(i, d), shared = m.options.shared();
  const auto squares = [&](std::int64_t begin, std::int64_t end) {
    double sum = 0;
    for (std::int64_t j = begin; j < end; ++j) sum += static_cast<double>(c[j]) * static_cast<double>(c[j]);
    return sum;
  };
  const double local = squares(own.begin, own.end());
  double mean;
  if (m.sharding == LatentSharding::gla) {
    mean = local / static_cast<double>(own.count);
  } else if (m.options.rms == TplaRms::exact) {
    mean = squares(0, d) / static_cast<double>(d);
  } else {
    const double scale = m.layers[static_cast<std::size_t>(layer)].rms_scale[static_cast<std::size_t>(i)];
    mean = scale * (local + squares(0, shared.end())) / static_cast<double>(d);
  }
  return 1 / std::sqrt(mean + ModelConfig::kInnerNormEps);
}

/// What one softmax sees beside the shared columns: a shard's columns, or all.
TplaRange softmax_columns(const ShardedModel& m, int i) {
  if (m.sharding == LatentSharding::whole_softmax) return {0, m.config.kv_lora_rank};
  return m.options.shard(i, m.config.kv_lora_rank);
}

/// keys[j] = the latent's column own.begin + j, normed by a shard's scale.
template <class T>
void norm_columns(const T* c, const T* gamma, double scale, TplaRange own, T* keys) {
  for (std::int64_t j = 0; j < own.count; ++j) {
    const std::int64_t column = own.begin + j;
    keys[j] = static_cast<T>(static_cast<double>(c[column]) * scale * static_cast<double>(gamma[column]));
  }
}

}  // namespace

/// One layer's tensors.
struct ShardedForward::Operands {
  std::int64_t layer = 0;
  const Runs& runs;
  const Tensor& q;         // [T, h, n + r]
  const Tensor& latent;    // [T, d + r]
  const Tensor& c;         // [T, d]
  const Tensor& absorbed;  // [T, h, d]
  const UpProjectionViews& up;
};

ShardedForward::ShardedForward(const ShardedModel& model) : model_(model) { check_model(model_); }

/// [T, 1, m + w + r]: shared columns, own columns, rope. Rows that decode normed carry the shard's own RMS.
Tensor ShardedForward::shard_keys(RankContext& ctx, const Operands& in, int shard) const {
  const ModelConfig& c = model_.config;
  const TplaRange own = softmax_columns(model_, shard), shared = model_.options.shared();
  const std::int64_t d = c.kv_lora_rank, r = c.qk_rope_head_dim, m = shared.count, w = own.count;
  const Tensor keys = ctx.empty("shard keys", MemoryClass::workspace, in.latent.dtype(), {in.runs.num_rows, m + w + r});
  if (m > 0) copy(ctx, "shared columns", in.latent.slice(1, 0, m), keys.slice(1, 0, m));
  copy(ctx, "own columns", in.latent.slice(1, own.begin, w), keys.slice(1, m, w));
  if (r > 0) copy(ctx, "k_pe", in.latent.slice(1, d, r), keys.slice(1, m + w, r));
  const bool own_rms = model_.sharding == LatentSharding::gla || model_.options.rms == TplaRms::sliced;
  if (own_rms && c.kv_a_layernorm) norm_decoded_rows(in, shard, keys);
  return keys.unflatten(1, {1, m + w + r});
}

/// Norms the rows that decode computes anew, by what a shard knows of their RMS. keys [T, m + w + r].
void ShardedForward::norm_decoded_rows(const Operands& in, int shard, const Tensor& keys) const {
  const TplaOptions& o = model_.options;
  const std::int64_t d = model_.config.kv_lora_rank;
  const bool whole = model_.sharding == LatentSharding::whole_softmax;
  visit_dtype(keys.dtype(), [&]<class T>() {
    const T* gamma = layer_weights(in.layer).attention.kv_a_layernorm.data<T>();
    for (const TokenRun& run : in.runs.sharded) {
      for (std::int64_t t = run.row; t < run.row + run.length; ++t) {
        const T* c = in.c.data<T>() + t * in.c.stride(0);
        T* to = keys.data<T>() + t * keys.stride(0);
        for (int i = whole ? 0 : shard; i < (whole ? o.num_shards : shard + 1); ++i) {
          const double scale = inverse_rms(model_, in.layer, i, c);
          norm_columns(c, gamma, scale, o.shared(), to);
          const TplaRange own = o.shard(i, d);
          norm_columns(c, gamma, scale, own, to + (whole ? own.begin : o.shared_columns));
        }
      }
    }
  });
}

/// [T, heads, m + w + r]: q̃ of the shared columns, κ·q̃ of the own ones, q_pe.
Tensor ShardedForward::shard_queries(RankContext& ctx, const Operands& in, int shard, IndexRange heads) const {
  const ModelConfig& c = model_.config;
  const TplaRange own = softmax_columns(model_, shard);
  const std::int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, m = model_.options.shared_columns, w = own.count;
  Tensor queries =
      ctx.empty("shard queries", MemoryClass::workspace, in.q.dtype(), {in.runs.num_rows, heads.count, m + w + r});
  const Tensor absorbed = in.absorbed.slice(1, heads.begin, heads.count);
  if (m > 0) copy(ctx, "q̃ of shared columns", absorbed.slice(2, 0, m), queries.slice(2, 0, m));
  if (r > 0) copy(ctx, "q_pe", in.q.slice(1, heads.begin, heads.count).slice(2, n, r), queries.slice(2, m + w, r));
  for (std::int64_t head = 0; head < heads.count; ++head) {
    const auto at = static_cast<std::size_t>((heads.begin + head) * model_.options.num_shards + shard);
    const bool sliced = model_.sharding == LatentSharding::tpla;
    const double kappa = !sliced ? 1 : model_.layers[static_cast<std::size_t>(in.layer)].kappa[at];
    scaled_sum(ctx, "κ q̃", absorbed.select(1, head).slice(1, own.begin, w), Tensor(), kappa,
               queries.select(1, head).slice(1, m, w));
  }
  return queries;
}

/// out [T, h, v] += what one shard's values give its heads, at all rows.
void ShardedForward::add_shard(RankContext& ctx, const Operands& in, int shard, const Tensor& out) const {
  const ModelConfig& c = model_.config;
  const bool gla = model_.sharding == LatentSharding::gla;
  const std::int64_t h = c.num_attention_heads, g = model_.options.num_shards;
  const IndexRange heads = gla ? IndexRange{shard * (h / g), h / g} : IndexRange{0, h};
  const TplaRange own = softmax_columns(model_, shard), shared = model_.options.shared();
  const std::int64_t width = shared.count + own.count;
  const bool said = own.count == 0 || model_.sharding == LatentSharding::whole_softmax;
  if (said && shard > 0) return;  // the first one had all columns
  const Tensor keys = shard_keys(ctx, in, shard), queries = shard_queries(ctx, in, shard, heads);
  AttentionInputs core{.q = queries, .k = keys, .v = keys.slice(2, 0, width)};
  core.query_runs = in.runs.sharded;
  core.key_runs = in.runs.all;
  core.scale = softmax_scale(c);
  const DType dtype = keys.dtype();
  const Tensor o = ctx.zeros("shard o", MemoryClass::workspace, dtype, {in.runs.num_rows, heads.count, width});
  const Tensor lse = ctx.empty("shard lse", MemoryClass::workspace, dtype, {heads.count, in.runs.num_rows});
  fused_attention_forward(ctx, core, o, lse);
  const Tensor w_uv = in.up.w_uv.slice(0, heads.begin, heads.count);
  const Tensor to = by_head(out.slice(1, heads.begin, heads.count));
  const auto add_columns = [&](std::int64_t from, TplaRange columns) {
    if (columns.count == 0) return;
    matmul(ctx, "W_UV o", by_head(o.slice(2, from, columns.count)),
           w_uv.slice(2, columns.begin, columns.count).transpose(1, 2), to, true);
  };
  add_columns(shared.count, own);
  if (shard == 0) add_columns(0, shared);
}

/// Overwrites the rows that prefill computes.
void ShardedForward::exact_rows(RankContext& ctx, const Operands& in, const Tensor& out) const {
  const ModelConfig& c = model_.config;
  const std::int64_t n = c.qk_nope_head_dim, r = c.qk_rope_head_dim, v = c.v_head_dim, h = c.num_attention_heads;
  const Tensor kv = ctx.empty("kv", MemoryClass::workspace, in.q.dtype(), {in.runs.num_rows, h * (n + v)});
  matmul(ctx, "up-project", in.latent.slice(1, 0, c.kv_lora_rank),
         layer_weights(in.layer).attention.kv_b_proj.transpose(0, 1), kv);
  const Tensor heads = kv.unflatten(1, {h, n + v});
  AttentionInputs core{.q = in.q.slice(2, 0, n), .k = heads.slice(2, 0, n), .v = heads.slice(2, n, v)};
  if (r > 0) {
    core.q_rope = in.q.slice(2, n, r);
    core.k_rope = in.latent.slice(1, c.kv_lora_rank, r).unflatten(1, {1, r});
  }
  core.query_runs = core.key_runs = in.runs.exact;
  core.scale = softmax_scale(c);
  const Tensor lse = ctx.empty("lse", MemoryClass::workspace, out.dtype(), {h, in.runs.num_rows});
  fused_attention_forward(ctx, core, out, lse);
}

Tensor ShardedForward::attention(RankContext& ctx, std::int64_t layer, std::span<const ScoredSequence> sequences,
                                 const Tensor& q, const Tensor& latent, const Tensor& c) const {
  const ModelConfig& config = model_.config;
  const std::int64_t h = config.num_attention_heads, n = config.qk_nope_head_dim, d = config.kv_lora_rank;
  const Runs runs = runs_of(sequences);
  const UpProjectionViews up = up_projection_views(config, layer_weights(layer).attention.kv_b_proj, {0, h});
  Tensor out = ctx.zeros("o", MemoryClass::workspace, q.dtype(), {runs.num_rows, h, config.v_head_dim});
  Tensor absorbed;
  if (!runs.sharded.empty()) {
    absorbed = ctx.empty("q absorbed", MemoryClass::workspace, q.dtype(), {runs.num_rows, h, d});
    matmul(ctx, "absorb q", by_head(q.slice(2, 0, n)), up.w_uk, by_head(absorbed));
  }
  const Operands in{layer, runs, q, latent, c, absorbed, up};
  for (int shard = 0; shard < model_.options.num_shards && !runs.sharded.empty(); ++shard) {
    add_shard(ctx, in, shard, out);
  }
  if (!runs.exact.empty()) exact_rows(ctx, in, out);
  return out;
}

Tensor ShardedForward::logits(RankContext& ctx, std::span<const ScoredSequence> sequences) {
  const PhaseScope phase(ctx, Phase::forward);
  const ModelConfig& config = model_.config;
  std::vector<std::int32_t> ids;
  std::vector<IndexRange> positions;
  std::int64_t longest = config.max_position_embeddings;
  for (const ScoredSequence& s : sequences) {
    ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    positions.push_back({0, static_cast<std::int64_t>(s.ids.size())});
    longest = std::max(longest, positions.back().count);
  }
  const RopeRows rope = make_rope_rows(ctx, config, model_.weights.norm.dtype(), 0, positions, 1, longest);
  Tensor x = embedding_forward(ctx, config, model_.weights.embed_tokens, ids);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const AttentionLayer layer{config, layer_weights(l).attention, rope};
    ProjectSaved saved;
    const Projected p = project_forward(ctx, layer, x, saved);
    const Tensor c = saved.c ? saved.c : p.latent.slice(1, 0, config.kv_lora_rank);
    x = output_forward(ctx, layer, attention(ctx, l, sequences, p.q, p.latent, c), x);
    FfnSaved ffn;
    x = ffn_forward(ctx, {config, layer_weights(l)}, x, {}, ffn);
  }
  return head_logits(ctx, {config, model_.weights.norm, model_.weights.lm_head}, x);
}

}  // namespace isomer
