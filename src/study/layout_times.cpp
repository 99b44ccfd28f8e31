#include "study/layout_times.h"

#include <algorithm>

#include "comm/communicator.h"
#include "core/error.h"
#include "study/decode_run.h"

namespace isomer {

namespace {

using nlohmann::json;

constexpr GroupOptions kTwoRanks{.num_ranks = 2, .threads_per_rank = 1};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// What one rank took for a prompt, both ways.
struct PromptTimes {
  std::vector<double> exact, sliced;
  double exact_flops = 0, sliced_flops = 0;
};

PromptTimes prompt_times(RankContext& ctx, const EngineOptions& options, const ModelWeights& weights,
                         std::int64_t tokens, int repetitions, bool virtual_clock) {
  Engine engine(ctx, options, weights);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 5);
  const auto timed = [&](std::vector<double>& times, double& flops, auto&& read) {
    const int sequence = engine.add_sequence();
    ctx.ops().clear();
    ctx.ledger().clear();
    ctx.comm().barrier();
    const auto now = [&] { return virtual_clock ? ctx.clock().now_s() : wall_clock_s(); };
    const double begin = now();
    read(sequence);
    times.push_back(now() - begin);
    flops = ctx.ops().flops(Phase::forward);
    engine.remove_sequence(ctx, sequence);
  };
  PromptTimes result;
  for (int i = 0; i < repetitions; ++i) {
    timed(result.exact, result.exact_flops, [&](int sequence) { engine.prefill(ctx, sequence, ids); });
    timed(result.sliced, result.sliced_flops, [&](int sequence) {
      const Engine::Input input{sequence, ids};
      engine.decode(ctx, {&input, 1});
    });
  }
  return result;
}

bool same_case(const LayoutTimeCase& a, const LayoutTimeCase& b) {
  return a.model == b.model && a.layout == b.layout && a.context == b.context && a.batch == b.batch;
}

}  // namespace

ModelConfig attention_model(const std::string& name, std::int64_t layers) {
  ModelConfig config = load_model_config(name);
  config.num_hidden_layers = layers;
  config.moe = {};
  config.vocab_size = 256;
  config.intermediate_size = 64;
  return config;
}

std::shared_ptr<const TplaModel> plain_tpla(const ModelConfig& config, int shards) {
  TplaModel model{.options = {.num_shards = shards}};
  const auto g = static_cast<std::size_t>(shards), h = static_cast<std::size_t>(config.num_attention_heads);
  model.layers.assign(static_cast<std::size_t>(config.num_hidden_layers),
                      {.kappa = std::vector<double>(h * g, 1), .rms_scale = std::vector<double>(g, 1)});
  return std::make_shared<const TplaModel>(std::move(model));
}

LayoutTime time_layout(const ModelConfig& config, const ModelWeights& weights, const LayoutTimeCase& c,
                       std::int64_t steps, std::uint64_t seed) {
  DecodeWorkload w{.config = config, .dtype = DType::bf16, .context = c.context, .batch = c.batch, .tokens = steps};
  w.seed = seed;
  w.tpla = plain_tpla(config, 2);
  DecodeRunOptions o{.group = kTwoRanks};
  o.layout = complete_layout(parse_decode_layout(c.layout, config), w.tpla.get());
  o.read = {std::vector<std::int32_t>(static_cast<std::size_t>(c.batch), 5)};
  const DecodeRun run = run_decode(w, weights, o);
  return {.of = c,
          .virtual_clock = run.virtual_clock,
          .seconds = run.seconds(),
          .attention_seconds = longest_part(run, "attention"),
          .cache_elements = decode_cache_elements(config, o.layout.shards),
          .bytes_sent = static_cast<double>(run.busiest().bytes_sent())};
}

PrefillTime time_prefills(const ModelConfig& config, const ModelWeights& weights, const std::string& model,
                          std::int64_t tokens, int repetitions) {
  EngineOptions options{.config = config, .layout = parse_decode_layout("tpla:g=2", config)};
  options.tpla = plain_tpla(config, 2);
  options.layout = complete_layout(options.layout, options.tpla.get());
  options.cache_tokens = cache_tokens_for({&tokens, 1}, options.layout, options.page_tokens);
  PrefillTime result{.model = model, .tokens = tokens, .virtual_clock = clock_is_virtual(kTwoRanks)};
  std::vector<PromptTimes> ranks(2);
  run_group(kTwoRanks, [&](RankContext& ctx) {
    ranks[static_cast<std::size_t>(ctx.rank())] =
        prompt_times(ctx, options, weights, tokens, repetitions, result.virtual_clock);
  });
  for (const PromptTimes& rank : ranks) {
    result.exact_seconds = std::max(result.exact_seconds, median(rank.exact));
    result.sliced_seconds = std::max(result.sliced_seconds, median(rank.sliced));
    result.exact_flops = std::max(result.exact_flops, rank.exact_flops);
    result.sliced_flops = std::max(result.sliced_flops, rank.sliced_flops);
  }
  return result;
}

json to_json(const LayoutTime& t) {
  return {{"model", t.of.model},
          {"layout", t.of.layout},
          {"context", t.of.context},
          {"batch", t.of.batch},
          {"virtual_clock", t.virtual_clock},
          {"seconds", t.seconds},
          {"attention_seconds", t.attention_seconds},
          {"cache_elements", t.cache_elements},
          {"bytes_sent", t.bytes_sent}};
}

json to_json(const PrefillTime& t) {
  return {{"model", t.model},
          {"tokens", t.tokens},
          {"virtual_clock", t.virtual_clock},
          {"exact_seconds", t.exact_seconds},
          {"sliced_seconds", t.sliced_seconds},
          {"exact_flops", t.exact_flops},
          {"sliced_flops", t.sliced_flops}};
}

std::vector<LayoutTime> layout_times_from(const json& list) {
  std::vector<LayoutTime> times;
  for (const json& t : list) {
    times.push_back({.of = {t.at("model"), t.at("layout"), t.at("context"), t.at("batch")},
                     .virtual_clock = t.at("virtual_clock"),
                     .seconds = t.at("seconds"),
                     .attention_seconds = t.at("attention_seconds"),
                     .cache_elements = t.at("cache_elements"),
                     .bytes_sent = t.at("bytes_sent")});
  }
  return times;
}

std::vector<PrefillTime> prefill_times_from(const json& list) {
  std::vector<PrefillTime> times;
  for (const json& t : list) {
    times.push_back({.model = t.at("model"),
                     .tokens = t.at("tokens"),
                     .virtual_clock = t.at("virtual_clock"),
                     .exact_seconds = t.at("exact_seconds"),
                     .sliced_seconds = t.at("sliced_seconds"),
                     .exact_flops = t.at("exact_flops"),
                     .sliced_flops = t.at("sliced_flops")});
  }
  return times;
}

const LayoutTime& find_time(const std::vector<LayoutTime>& times, const LayoutTimeCase& c) {
  const auto found = std::find_if(times.begin(), times.end(), [&](const LayoutTime& t) { return same_case(t.of, c); });
  if (found == times.end()) {
    throw Error(fmt::format("the recording has no {} of {} with {} cached tokens and {} sequences", c.layout, c.model,
                            c.context, c.batch));
  }
  return *found;
}

}  // namespace isomer
