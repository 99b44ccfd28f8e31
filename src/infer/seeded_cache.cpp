#include "infer/seeded_cache.h"

#include "kernels/dispatch.h"

namespace isomer {

namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The sum of two uniform numbers of seven bits, less its mean: −127 … 127, of standard deviation 52, over 64.
float noise_of(std::uint64_t row, std::int64_t column) {
  const std::uint64_t bits = mix(row + static_cast<std::uint64_t>(column));
  return static_cast<float>(static_cast<int>(bits >> 57) + static_cast<int>(bits >> 20 & 127) - 127) * 0x1p-6f;
}

/// Rows of one tensor at `run`, its heads' elements from the columns of the whole row that `parts` names.
struct SeededRows {
  Tensor rows;  // [rows, heads, width]
  std::vector<IndexRange> parts;
  std::uint64_t seed = 0;
};

template <class T>
void fill_row(const SeededRows& to, std::int64_t row, std::int64_t position) {
  T* at = to.rows.data<T>() + row * to.rows.stride(0);
  const std::uint64_t key = mix(to.seed ^ (static_cast<std::uint64_t>(position) << 20));
  for (const IndexRange& part : to.parts) {
    for (std::int64_t column = part.begin; column < part.end(); ++column) *at++ = static_cast<T>(noise_of(key, column));
  }
}

void fill_runs(RankContext& ctx, const SeededRows& to, const std::vector<TokenRun>& runs) {
  std::int64_t count = 0;
  for (const TokenRun& run : runs) count += run.length;
  const std::int64_t row_bytes = to.rows.size(1) * to.rows.size(2) * size_of(to.rows.dtype());
  run_kernel(ctx, "seeded cache rows", {0, 0, static_cast<double>(count * row_bytes)}, [&] {
    visit_dtype(to.rows.dtype(), [&]<class T>() {
      ctx.threads().parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t i, int) {
        const TokenRun& run = runs[static_cast<std::size_t>(i)];
        for (std::int64_t j = 0; j < run.length; ++j) fill_row<T>(to, run.row + j, run.position + j);
      });
    });
  });
}

/// The rows of positions [begin, begin + tokens) of a sequence.
void fill_sequence(RankContext& ctx, Engine& engine, int sequence, IndexRange positions, std::uint64_t seed) {
  const EngineOptions& o = engine.options();
  const KvCache& cache = engine.cache();
  const RankCache mine = rank_cache_of(o.layout, o.config, engine.rank());
  const bool latent = o.config.attention == AttentionKind::mla;
  const std::vector<IndexRange> heads = {
      {mine.kv_heads.begin * o.config.head_dim, mine.kv_heads.count * o.config.head_dim}};
  const std::vector<TokenRun> runs = cache.runs(sequence, positions.begin, positions.end());
  const std::int64_t first = cache.options().first_layer;
  for (std::int64_t layer = first; layer < first + cache.options().num_layers; ++layer) {
    const std::uint64_t of_layer = mix(seed * 2 + 1) + 2 * static_cast<std::uint64_t>(layer);
    fill_runs(ctx, {cache.keys(layer), latent ? mine.columns : heads, mix(of_layer)}, runs);
    if (!latent) fill_runs(ctx, {cache.values(layer), heads, mix(of_layer + 1)}, runs);
  }
}

}  // namespace

void append_seeded_rows(RankContext& ctx, Engine& engine, std::span<const int> sequences, std::int64_t tokens,
                        std::uint64_t seed) {
  const PhaseScope phase(ctx, Phase::setup);
  std::vector<KvCache::Growth> growth;
  for (const int sequence : sequences) growth.push_back({sequence, tokens});
  engine.cache().grow(growth);
  if (ctx.dry_run()) return;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (!engine.cache().owns(sequences[i])) continue;
    const std::int64_t begin = engine.length(sequences[i]) - tokens;
    fill_sequence(ctx, engine, sequences[i], {begin, tokens}, seed + i);
  }
}

}  // namespace isomer
