#include "infer/generate.h"

#include "core/record.h"

namespace isomer {

namespace {

void check_requests(const Engine& engine, const std::vector<Request>& requests) {
  const ModelConfig& c = engine.options().config;
  std::vector<std::int64_t> lengths;
  for (const Request& r : requests) {
    check_sampling(r.sampling);
    if (r.prompt.empty()) invalid_argument("the prompt is empty: give at least one token of text");
    if (r.max_new_tokens < 1) invalid_argument("{} new tokens: ask for at least 1", r.max_new_tokens);
    const auto prompt = static_cast<std::int64_t>(r.prompt.size());
    if (c.max_position_embeddings > 0 && prompt + r.max_new_tokens - 1 > c.max_position_embeddings) {
      invalid_argument(
          "a prompt of {} tokens and {} new ones go beyond the {} positions of {} (max_position_embeddings): shorten "
          "the prompt or ask for at most {} tokens",
          prompt, r.max_new_tokens, c.max_position_embeddings, c.name, c.max_position_embeddings - prompt + 1);
    }
    lengths.push_back(prompt + r.max_new_tokens - 1);  // the last token is never read
  }
  const CacheOptions& cache = engine.cache().options();
  std::int64_t pages = 0;
  for (const std::int64_t length : lengths) pages += pages_for(length, cache.page_tokens, cache.shards);
  if (pages <= engine.cache().num_free_pages()) return;
  invalid_argument(
      "the cache is too small: {} tokens of {} sequences need {} pages of {} tokens, {} are free: give it "
      "at least {} tokens",
      [&] {
        std::int64_t sum = 0;
        for (const std::int64_t length : lengths) sum += length;
        return sum;
      }(),
      requests.size(), pages, cache.page_tokens, engine.cache().num_free_pages(),
      cache_tokens_for(lengths, engine.options().layout, cache.page_tokens));
}

/// A request under way.
struct Active {
  std::size_t request;
  int sequence;
  std::int32_t last;  // chosen, not yet read
};

}  // namespace

Generated generate(RankContext& ctx, Engine& engine, const std::vector<Request>& requests,
                   const GenerateOptions& options) {
  check_requests(engine, requests);
  Generated result;
  result.tokens.resize(requests.size());
  std::vector<Active> active;
  /// Takes the next token of a request; false where that ends it.
  const auto take = [&](std::size_t request, const Tensor& logits, std::int64_t row, std::int32_t& token) {
    std::vector<std::int32_t>& mine = result.tokens[request];
    token =
        sample_token(logits_of_row(logits, row), requests[request].sampling, static_cast<std::int64_t>(mine.size()));
    if (token == options.eos) return false;
    mine.push_back(token);
    if (options.on_token) options.on_token(request, token);
    return static_cast<std::int64_t>(mine.size()) < requests[request].max_new_tokens;
  };
  const double begin_s = wall_clock_s();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    Active one{r, engine.add_sequence(), 0};
    const Tensor logits = engine.prefill(ctx, one.sequence, requests[r].prompt);
    result.prompt_tokens += static_cast<std::int64_t>(requests[r].prompt.size());
    if (take(r, logits, 0, one.last)) {
      active.push_back(one);
    } else {
      engine.remove_sequence(ctx, one.sequence);
    }
  }
  const double prefilled_s = wall_clock_s();
  while (!active.empty()) {
    std::vector<Engine::Input> inputs;
    for (const Active& one : active) inputs.push_back({one.sequence, {&one.last, 1}});
    const Tensor logits = engine.decode(ctx, inputs);
    ++result.decode_steps;
    std::vector<Active> still;
    for (std::size_t i = 0; i < active.size(); ++i) {
      ++result.decoded_tokens;
      if (take(active[i].request, logits, static_cast<std::int64_t>(i), active[i].last)) {
        still.push_back(active[i]);
      } else {
        engine.remove_sequence(ctx, active[i].sequence);
      }
    }
    active = std::move(still);
  }
  result.prefill_s = prefilled_s - begin_s;
  result.decode_s = wall_clock_s() - prefilled_s;
  return result;
}

}  // namespace isomer
