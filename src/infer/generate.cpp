#include "infer/generate.h"

#include <algorithm>

#include "core/record.h"
#include "infer/hand_over.h"

namespace isomer {

namespace {

/// Positions that a request takes in the cache; the last token is never read.
std::int64_t length_of(const TextRequest& r) {
  return static_cast<std::int64_t>(r.prompt.size()) + r.max_new_tokens - 1;
}

void check_room(const EngineOptions& o, const std::vector<TextRequest>& requests, std::int64_t free_pages) {
  const CacheShards shards = cache_shards_of(o.layout);
  std::vector<std::int64_t> lengths;
  std::int64_t tokens = 0;
  for (const TextRequest& r : requests) {
    lengths.push_back(length_of(r));
    tokens += lengths.back();
  }
  const std::int64_t pages = cache_tokens_for(lengths, o.layout, o.page_tokens) / shards.num_slices / o.page_tokens;
  if (pages <= free_pages) return;
  invalid_argument(
      "the cache is too small: {} tokens of {} sequences need {} pages of {} tokens, {} are free: give it at least {} "
      "tokens",
      tokens, requests.size(), pages, o.page_tokens, free_pages, cache_tokens_for(lengths, o.layout, o.page_tokens));
}

/// A request under way.
struct Active {
  std::size_t request;
  int sequence;
  std::int32_t last;  // chosen, not yet read
};

/// The decode half: requests whose prompts stand in the engine's cache.
class Decoding {
 public:
  Decoding(RankContext& ctx, Engine& engine, const std::vector<TextRequest>& requests, const GenerateOptions& options)
      : ctx_(ctx), engine_(engine), requests_(requests), options_(options) {
    result.tokens.resize(requests.size());
  }

  /// A prompt's first token has been chosen.
  void begin(std::size_t request, int sequence, std::int32_t first) {
    if (take(request, first)) {
      active_.push_back({request, sequence, first});
    } else {
      engine_.remove_sequence(ctx_, sequence);
    }
  }

  void run() {
    const double begin_s = wall_clock_s();
    while (!active_.empty()) step();
    result.decode_s = wall_clock_s() - begin_s;
    result.cache_bytes = ctx_.memory().current_bytes(MemoryClass::cache);
  }

  Generated result;

 private:
  /// False where the token ends its request.
  bool take(std::size_t request, std::int32_t token) {
    if (token == options_.eos) return false;
    std::vector<std::int32_t>& mine = result.tokens[request];
    mine.push_back(token);
    if (options_.on_token) options_.on_token(request, token);
    return static_cast<std::int64_t>(mine.size()) < requests_[request].max_new_tokens;
  }

  void step() {
    std::vector<Engine::Input> inputs;
    for (const Active& one : active_) inputs.push_back({one.sequence, {&one.last, 1}});
    const Tensor logits = engine_.decode(ctx_, inputs);
    ++result.decode_steps;
    std::vector<Active> still;
    for (std::size_t i = 0; i < active_.size(); ++i) {
      Active& one = active_[i];
      ++result.decoded_tokens;
      one.last = sample_token(logits_of_row(logits, static_cast<std::int64_t>(i)), requests_[one.request].sampling,
                              static_cast<std::int64_t>(result.tokens[one.request].size()));
      if (take(one.request, one.last)) {
        still.push_back(one);
      } else {
        engine_.remove_sequence(ctx_, one.sequence);
      }
    }
    active_ = std::move(still);
  }

  RankContext& ctx_;
  Engine& engine_;
  const std::vector<TextRequest>& requests_;
  const GenerateOptions& options_;
  std::vector<Active> active_;
};

/// Reads a prompt and chooses the first token after it.
std::int32_t first_token(RankContext& ctx, Engine& engine, int sequence, const TextRequest& request) {
  const Tensor logits = engine.prefill(ctx, sequence, request.prompt);
  return sample_token(logits_of_row(logits, 0), request.sampling, 0);
}

}  // namespace

void check_requests(const EngineOptions& options, const std::vector<TextRequest>& requests) {
  const ModelConfig& c = options.config;
  if (const int groups = options.layout.shards.data_parallel; groups > std::ssize(requests)) {
    invalid_argument(
        "layout '{}' gives every one of {} ranks sequences of its own, {} would leave {} without: give at least {}, or "
        "take a layout that shares a sequence (tp, kvp, helix)",
        to_string(options.layout), groups, requests.size(), groups - std::ssize(requests), groups);
  }
  for (const TextRequest& r : requests) {
    check_sampling(r.sampling);
    if (r.prompt.empty()) invalid_argument("the prompt is empty: give at least one token of text");
    if (r.max_new_tokens < 1) invalid_argument("{} new tokens: ask for at least 1", r.max_new_tokens);
    const auto prompt = static_cast<std::int64_t>(r.prompt.size());
    if (c.max_position_embeddings <= 0 || length_of(r) <= c.max_position_embeddings) continue;
    invalid_argument(
        "a prompt of {} tokens and {} new ones go beyond the {} positions of {} (max_position_embeddings): shorten "
        "the prompt or ask for at most {} tokens",
        prompt, r.max_new_tokens, c.max_position_embeddings, c.name,
        std::max<std::int64_t>(0, c.max_position_embeddings - prompt + 1));
  }
  check_room(options, requests, pages_for(options.cache_tokens, options.page_tokens, cache_shards_of(options.layout)));
}

Generated generate(RankContext& ctx, Engine& engine, const std::vector<TextRequest>& requests,
                   const GenerateOptions& options) {
  check_requests(engine.options(), requests);
  check_room(engine.options(), requests, engine.cache().num_free_pages());
  Decoding decoding(ctx, engine, requests, options);
  const double begin_s = wall_clock_s();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const int sequence = engine.add_sequence();
    decoding.begin(r, sequence, first_token(ctx, engine, sequence, requests[r]));
    decoding.result.prompt_tokens += static_cast<std::int64_t>(requests[r].prompt.size());
  }
  decoding.result.prefill_s = wall_clock_s() - begin_s;
  decoding.run();
  return std::move(decoding.result);
}

int SeparatedOptions::num_ranks() const {
  const int prefill_ranks = prefill.layout.devices(), decode_ranks = decode.layout.devices();
  return apart ? prefill_ranks + decode_ranks : std::max(prefill_ranks, decode_ranks);
}

namespace {

/// Two engines on groups of the world; a rank has that of each group that it is in.
class SeparatedEngines {
 public:
  SeparatedEngines(RankContext& ctx, const SeparatedOptions& options, const ModelWeights& weights)
      : ctx_(ctx),
        config_(options.decode.config),
        to_{complete_layout(options.decode.layout, options.decode.tpla.get()), 0},
        from_{complete_layout(options.prefill.layout, options.prefill.tpla.get()),
              options.apart ? options.decode.layout.devices() : 0} {
    const std::string reason = why_hand_over_unfit(config_, from_, to_, ctx.world_size(), options.decode.tpla.get());
    if (!reason.empty()) invalid_argument("{}", reason);
    prefill_comm_ = ctx.comm().split(from_.has(ctx.rank()) ? 0 : 1, ctx.rank());
    decode_comm_ = ctx.comm().split(to_.has(ctx.rank()) ? 0 : 1, ctx.rank());
    if (from_.has(ctx.rank())) prefill_.emplace(ctx, *prefill_comm_, options.prefill, weights);
    if (to_.has(ctx.rank())) decode_.emplace(ctx, *decode_comm_, options.decode, weights);
  }
  Engine* decode() { return decode_ ? &*decode_ : nullptr; }

  struct Begun {
    int sequence = 0;  // of the decode engine
    std::int32_t token = 0;
  };
  /// Reads a prompt, chooses the first token, and hands the cache over.
  Begun begin(const TextRequest& request) {
    CacheSequence source, target;
    if (prefill_) source = {&prefill_->cache(), prefill_->add_sequence()};
    if (decode_) target = {&decode_->cache(), decode_->add_sequence()};
    const double mine = prefill_ ? first_token(ctx_, *prefill_, source.sequence, request) : -1;
    const auto token = static_cast<std::int32_t>(ctx_.comm().max_over_ranks(mine));
    hand_over_cache(ctx_, ctx_.comm(), config_, std::ssize(request.prompt), from_, source, to_, target);
    if (prefill_) prefill_->remove_sequence(ctx_, source.sequence);
    return {target.sequence, token};
  }

 private:
  RankContext& ctx_;
  const ModelConfig& config_;
  CacheGroup to_, from_;
  std::unique_ptr<Communicator> prefill_comm_, decode_comm_;
  std::optional<Engine> prefill_, decode_;
};

}  // namespace

Generated generate_separated(RankContext& ctx, SeparatedOptions options, const ModelWeights& weights,
                             const std::vector<TextRequest>& requests, const GenerateOptions& generate_options) {
  check_requests(options.decode, requests);
  if (options.prefill.cache_tokens == 0) {
    std::int64_t longest = 1;
    for (const TextRequest& r : requests) longest = std::max<std::int64_t>(longest, std::ssize(r.prompt));
    options.prefill.cache_tokens = cache_tokens_for({&longest, 1}, options.prefill.layout, options.prefill.page_tokens);
  }
  SeparatedEngines engines(ctx, options, weights);
  std::optional<Decoding> decoding;
  if (Engine* engine = engines.decode()) decoding.emplace(ctx, *engine, requests, generate_options);
  Generated none;
  const double begin_s = wall_clock_s();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const auto begun = engines.begin(requests[r]);
    if (decoding) decoding->begin(r, begun.sequence, begun.token);
    none.prompt_tokens += std::ssize(requests[r].prompt);
  }
  none.prefill_s = wall_clock_s() - begin_s;
  if (!decoding) return none;
  decoding->result.prompt_tokens = none.prompt_tokens;
  decoding->result.prefill_s = none.prefill_s;
  decoding->run();
  return std::move(decoding->result);
}

}  // namespace isomer
