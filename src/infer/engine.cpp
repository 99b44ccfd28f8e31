#include "infer/engine.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "layers/head.h"
#include "parallel/decode/stages.h"

namespace isomer {

namespace {

void check_sizes(int num_ranks, const EngineOptions& o, const ModelWeights& weights) {
  const auto least_one = [](std::string_view name, std::int64_t value) {
    if (value < 1) invalid_argument("{} is {}, must be at least 1", name, value);
  };
  least_one("the cache's number of tokens", o.cache_tokens);
  least_one("page_tokens", o.page_tokens);
  least_one("prefill_chunk", o.prefill_chunk);
  if (o.layout.devices() != num_ranks) {
    invalid_argument("layout '{}' has {} ranks, {} were started", to_string(o.layout), o.layout.devices(), num_ranks);
  }
  const DType dtype = weights.norm.dtype(), cache = o.cache_dtype.value_or(dtype);
  if (dtype != cache && (dtype == DType::f64 || cache == DType::f64)) {
    invalid_argument("a cache of {} does not go with weights of {}: float64 goes with itself alone", name_of(cache),
                     name_of(dtype));
  }
}

CacheOptions cache_options(const EngineOptions& o, DType weights, const Pipeline& pipeline, int rank_of_world) {
  const RankCache mine = rank_cache_of(o.layout, o.config, pipeline.ranks_of_stage().rank());
  const IndexRange layers = pipeline.layers();
  CacheOptions cache{.num_layers = layers.count, .first_layer = layers.begin, .row = cache_row_shape(o.config, mine)};
  cache.dtype = o.cache_dtype.value_or(weights);
  cache.page_tokens = o.page_tokens;
  cache.shards = mine.shards;
  cache.slice = mine.slice;
  cache.num_owners = o.layout.shards.data_parallel;
  cache.owner = cache.num_owners > 1 ? rank_of_world : 0;
  cache.num_pages = o.cache_pages > 0 ? o.cache_pages : pages_for(o.cache_tokens, o.page_tokens, cache.shards);
  return cache;
}

}  // namespace

std::int64_t cache_pages_for(std::span<const std::int64_t> lengths, const DecodeLayout& layout,
                             std::int64_t page_tokens) {
  const CacheShards shards = cache_shards_of(layout);
  const auto groups = static_cast<std::size_t>(layout.shards.data_parallel);
  std::vector<std::int64_t> pages(groups);
  for (std::size_t i = 0; i < lengths.size(); ++i) pages[i % groups] += pages_for(lengths[i], page_tokens, shards);
  return *std::max_element(pages.begin(), pages.end());
}

std::int64_t cache_tokens_for(std::span<const std::int64_t> lengths, const DecodeLayout& layout,
                              std::int64_t page_tokens) {
  return cache_pages_for(lengths, layout, page_tokens) * page_tokens * cache_shards_of(layout).num_slices;
}

void join_engine_splits(Communicator& comm, const EngineOptions& options) {
  const DecodeLayout layout = complete_layout(options.layout, options.tpla.get());
  const Pipeline pipeline(comm, layout, options.config);
  make_step_scheme({pipeline.ranks_of_stage(), layout, options.config, options.tpla.get()});
}

Engine::Engine(RankContext& ctx, Communicator& comm, EngineOptions options, const ModelWeights& weights)
    : comm_(comm), options_(std::move(options)) {
  options_.layout = complete_layout(options_.layout, options_.tpla.get());
  check_sizes(comm.size(), options_, weights);
  pipeline_ = std::make_unique<Pipeline>(comm, options_.layout, options_.config);
  scheme_ = make_step_scheme({pipeline_->ranks_of_stage(), options_.layout, options_.config, options_.tpla.get()});
  ModelWeights mine = weights;
  const IndexRange layers = pipeline_->layers();
  for (std::int64_t layer = 0; layer < options_.config.num_hidden_layers; ++layer) {
    if (layer < layers.begin || layer >= layers.end()) mine.layers[static_cast<std::size_t>(layer)] = {};
  }
  model_ = cut_model(options_.config, mine, *scheme_, pipeline_->ranks_of_stage().rank());
  cache_ = std::make_unique<KvCache>(ctx, cache_options(options_, weights.norm.dtype(), *pipeline_, comm.rank()));
}

void Engine::check(std::span<const Input> inputs) const {
  if (inputs.empty()) invalid_argument("a step without sequences: give at least one");
  const ModelConfig& c = options_.config;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = inputs[i];
    if (input.ids.empty()) invalid_argument("sequence {} has no new tokens: give at least one", input.sequence);
    const bool twice = std::any_of(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const Input& before) { return before.sequence == input.sequence; });
    if (twice) invalid_argument("sequence {} stands in a step twice", input.sequence);
    for (const std::int32_t id : input.ids) {
      if (id >= 0 && id < c.vocab_size) continue;
      invalid_argument("token {} is outside the vocabulary of {} tokens of {}: take this model's tokenizer", id,
                       c.vocab_size, c.name);
    }
    const std::int64_t length = cache_->length(input.sequence), more = static_cast<std::int64_t>(input.ids.size());
    if (c.max_position_embeddings > 0 && length + more > c.max_position_embeddings) {
      invalid_argument("{} tokens after {} go beyond the {} positions of {} (max_position_embeddings): ask for less",
                       more, length, c.max_position_embeddings, c.name);
    }
  }
}

Tensor Engine::through_layers(RankContext& ctx, std::span<const Input> inputs, std::span<const std::int64_t> begins,
                              bool explicit_form) {
  DecodeStep step{.explicit_form = explicit_form};
  std::vector<std::int32_t> ids;
  std::vector<IndexRange> positions;
  const int groups = options_.layout.shards.data_parallel;
  step.rows_of_group.resize(static_cast<std::size_t>(groups));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto count = static_cast<std::int64_t>(inputs[i].ids.size());
    step.rows_of_group[static_cast<std::size_t>(inputs[i].sequence % groups)] += count;
    if (!cache_->owns(inputs[i].sequence)) continue;
    positions.push_back({begins[i], count});
    step.sequences.push_back({inputs[i].sequence, step.num_rows, positions.back()});
    step.num_rows += count;
    ids.insert(ids.end(), inputs[i].ids.begin(), inputs[i].ids.end());
  }
  const ModelConfig& c = options_.config;
  if (!ids.empty())
    step.rope = make_rope_rows(ctx, c, model_.explicit_part.weights.norm.dtype(), 0, positions, 1,
                               std::max(options_.cache_tokens, c.max_position_embeddings));
  Tensor x;
  if (ids.empty()) {
    x = ctx.empty("no rows", MemoryClass::workspace, model_.explicit_part.weights.norm.dtype(), {0, c.hidden_size});
  } else if (pipeline_->stage() > 0) {
    x = pipeline_->receive(ctx, step.num_rows, c.hidden_size, model_.explicit_part.weights.norm.dtype());
  } else {
    x = embedding_forward(ctx, c, model_.explicit_part.weights.embed_tokens, ids);
    x.reclassify(MemoryClass::workspace);
  }
  for (std::int64_t layer = pipeline_->layers().begin; layer < pipeline_->layers().end(); ++layer) {
    const DecodeBlock block{model_, layer, step, *cache_, pipeline_->ranks_of_stage()};
    x = scheme_->attention(ctx, block, x);
    x = scheme_->ffn(ctx, block, x);
  }
  return groups == 1 ? x : of_all_groups(ctx, inputs, x);
}

Tensor Engine::of_all_groups(RankContext& ctx, std::span<const Input> inputs, const Tensor& x) const {
  const PhaseScope phase(ctx, Phase::report);
  const int groups = options_.layout.shards.data_parallel;
  std::vector<std::int64_t> begin(static_cast<std::size_t>(groups) + 1), next;
  for (const Input& input : inputs) {
    begin[static_cast<std::size_t>(input.sequence % groups) + 1] += static_cast<std::int64_t>(input.ids.size());
  }
  for (std::size_t group = 1; group < begin.size(); ++group) begin[group] += begin[group - 1];
  const auto make = [&](std::string_view name) {
    return ctx.empty(name, MemoryClass::communication, x.dtype(), {begin.back(), x.size(1)});
  };
  const Tensor by_group = make("x by groups");
  Tensor all = make("x of all groups");
  std::vector<Tensor> receive;
  for (std::size_t group = 0; group + 1 < begin.size(); ++group) {
    receive.push_back(by_group.slice(0, begin[group], begin[group + 1] - begin[group]));
  }
  comm_.all_gather("x of all groups", x, receive);
  next = begin;
  std::int64_t row = 0;
  for (const Input& input : inputs) {
    const auto count = static_cast<std::int64_t>(input.ids.size());
    std::int64_t& from = next[static_cast<std::size_t>(input.sequence % groups)];
    copy(ctx, "order of inputs", by_group.slice(0, from, count), all.slice(0, row, count));
    from += count;
    row += count;
  }
  return all;
}

Tensor Engine::forward(RankContext& ctx, std::span<const Input> inputs, std::span<const std::int64_t> begins,
                       bool explicit_form) {
  const PhaseScope phase(ctx, Phase::forward);
  if (pipeline_->num_stages() == 1) return through_layers(ctx, inputs, begins, explicit_form);
  // As many parts of the batch as stages, so that all stages work.
  const auto count = static_cast<std::int64_t>(inputs.size());
  const std::int64_t parts = std::min<std::int64_t>(pipeline_->num_stages(), count);
  std::int64_t rows = 0, row = 0;
  for (const Input& input : inputs) rows += static_cast<std::int64_t>(input.ids.size());
  Tensor all = ctx.empty("x of the last stage", MemoryClass::workspace, model_.explicit_part.weights.norm.dtype(),
                         {rows, options_.config.hidden_size});
  std::vector<Work> works;
  for (std::int64_t part = 0; part < parts; ++part) {
    const IndexRange range = balanced_part(count, parts, part);
    const auto begin = static_cast<std::size_t>(range.begin), size = static_cast<std::size_t>(range.count);
    const Tensor x = through_layers(ctx, inputs.subspan(begin, size), begins.subspan(begin, size), explicit_form);
    works.push_back(pipeline_->send(x));
    copy(ctx, "collect x", x, all.slice(0, row, x.size(0)));
    row += x.size(0);
  }
  for (Work& work : works) work.wait();
  pipeline_->share(ctx, all);
  return all;
}

Tensor Engine::logits(RankContext& ctx, const Tensor& x) const {
  const PhaseScope phase(ctx, Phase::forward);
  const ModelWeights& weights = model_.explicit_part.weights;
  return head_logits(ctx, {options_.config, weights.norm, weights.lm_head}, x);
}

Tensor Engine::prefill(RankContext& ctx, int sequence, std::span<const std::int32_t> ids, LogitRows rows) {
  const Input whole{sequence, ids};
  check({&whole, 1});
  const auto count = static_cast<std::int64_t>(ids.size());
  std::int64_t begin = cache_->length(sequence);
  const KvCache::Growth growth{sequence, count};
  cache_->grow({&growth, 1});
  Tensor all;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t length = std::min(options_.prefill_chunk, count - done);
    const Input chunk{sequence, ids.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(length))};
    const Tensor x = forward(ctx, {&chunk, 1}, {&begin, 1}, true);
    begin += length;
    done += length;
    if (rows == LogitRows::all) {
      Tensor part = logits(ctx, x);
      if (length == count) return part;
      if (!all) all = ctx.empty("logits of a prompt", MemoryClass::workspace, part.dtype(), {count, part.size(1)});
      copy(ctx, "collect logits", part, all.slice(0, done - length, length));
    } else if (done == count) {
      all = logits(ctx, x.slice(0, length - 1, 1));
    }
  }
  return all;
}

Tensor Engine::decode(RankContext& ctx, std::span<const Input> inputs) {
  check(inputs);
  std::vector<KvCache::Growth> growth;
  std::vector<std::int64_t> begins;
  for (const Input& input : inputs) {
    growth.push_back({input.sequence, static_cast<std::int64_t>(input.ids.size())});
    begins.push_back(cache_->length(input.sequence));
  }
  cache_->grow(growth);
  return logits(ctx, forward(ctx, inputs, begins, false));
}

}  // namespace isomer
