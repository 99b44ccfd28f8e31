#include "eval/engine_source.h"

#include "kernels/elementwise.h"

namespace isomer {

namespace {

/// Logits of all sequences by an engine, one after another: each gets the whole cache.
Tensor engine_logits(RankContext& ctx, Engine& engine, std::span<const ScoredSequence> sequences, bool all_exact) {
  std::int64_t rows = 0, row = 0;
  for (const ScoredSequence& s : sequences) rows += std::ssize(s.ids);
  Tensor all;
  const auto keep = [&](const Tensor& part) {
    if (!all) all = ctx.empty("logits of a window", MemoryClass::workspace, part.dtype(), {rows, part.size(1)});
    copy(ctx, "collect logits", part, all.slice(0, row, part.size(0)));
    row += part.size(0);
  };
  for (const ScoredSequence& s : sequences) {
    const int sequence = engine.add_sequence();
    const std::span<const std::int32_t> ids(s.ids);
    const auto exact = all_exact ? ids.size() : static_cast<std::size_t>(s.exact_rows);
    if (exact > 0) keep(engine.prefill(ctx, sequence, ids.first(exact), LogitRows::all));
    if (exact < ids.size()) {
      const Engine::Input input{sequence, ids.subspan(exact)};
      keep(engine.decode(ctx, {&input, 1}));
    }
    engine.remove_sequence(ctx, sequence);
  }
  return all;
}

}  // namespace

Tensor EngineSource::logits(RankContext& ctx, std::span<const ScoredSequence> sequences) {
  return engine_logits(ctx, engine_, sequences, false);
}

PrefillSource::PrefillSource(RankContext& ctx, const ModelConfig& config, const ModelWeights& weights,
                             std::int64_t window)
    : alone_(ctx.comm().split(ctx.rank(), 0)) {
  if (ctx.rank() != 0) return;
  EngineOptions options{.config = config, .layout = parse_decode_layout("tp:1", config)};
  options.cache_tokens = window_cache_tokens(window, options.layout, options.page_tokens);
  engine_.emplace(ctx, *alone_, std::move(options), weights);
}

Tensor PrefillSource::logits(RankContext& ctx, std::span<const ScoredSequence> sequences) {
  return engine_ ? engine_logits(ctx, *engine_, sequences, true) : Tensor();
}

std::int64_t window_cache_tokens(std::int64_t window, const DecodeLayout& layout, std::int64_t page_tokens) {
  return cache_tokens_for({&window, 1}, layout, page_tokens);
}

}  // namespace isomer
