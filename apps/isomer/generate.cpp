// isomer generate: decodes text under any decode layout, and writes it as it comes.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/commands.h"
#include "apps/isomer/loaded_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "infer/generate.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

using nlohmann::json;

struct GenerateArguments {
  std::string model, tokenizer, prompt, layout = "tp:1", dtype = "f32", cache_dtype, seed = "0", json_file;
  std::string tokens = "100", cache_tokens, prefill_chunk = "512";
  double temperature = 0, top_p = 1;
  bool greedy = false, ignore_eos = false;
  int threads = 0;
};

/// Bytes of text as they come, written as soon as they are whole characters.
class TextStream {
 public:
  void write(std::string_view bytes) {
    pending_ += bytes;
    const std::size_t whole = pending_.size() - unfinished_bytes();
    put(std::string_view(pending_).substr(0, whole));
    pending_.erase(0, whole);
  }
  void finish() {
    put(pending_);
    pending_.clear();
    std::fputs("\n", stdout);
  }

 private:
  /// Bytes at the end that begin a character and don't end it.
  std::size_t unfinished_bytes() const {
    for (std::size_t back = 1; back <= 3 && back <= pending_.size(); ++back) {
      const auto byte = static_cast<unsigned char>(pending_[pending_.size() - back]);
      if ((byte & 0xc0) == 0x80) continue;
      const std::size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
      return length > back ? back : 0;
    }
    return 0;
  }
  static void put(std::string_view text) {
    const std::string valid = replace_invalid_utf8(text);
    std::fwrite(valid.data(), 1, valid.size(), stdout);
    std::fflush(stdout);
  }
  std::string pending_;
};

Sampling sampling_of(const GenerateArguments& a) {
  if (a.greedy && a.temperature != 0) {
    invalid_argument("--greedy with --temperature {}: greedy is temperature 0; give one of them", a.temperature);
  }
  const Sampling sampling{.temperature = a.temperature, .top_p = a.top_p, .seed = parse_seed(a.seed)};
  check_sampling(sampling);
  return sampling;
}

std::vector<std::int32_t> prompt_ids(const GenerateArguments& a, const Tokenizer& tokenizer) {
  if (a.prompt.empty()) invalid_argument("--prompt is empty: give some text to go on from");
  if (const auto at = invalid_utf8_at(a.prompt)) invalid_argument("--prompt is not UTF-8: byte {} is ill-formed", *at);
  return tokenizer.encode(a.prompt, true);
}

EngineOptions engine_options(const GenerateArguments& a, const LoadedModel& model, std::int64_t length) {
  EngineOptions options{.config = model.config, .layout = parse_layout(a.layout)};
  if (!a.cache_dtype.empty()) options.cache_dtype = parse_dtype(a.cache_dtype);
  constexpr std::int64_t kMost = std::int64_t{1} << 32;
  options.cache_tokens = a.cache_tokens.empty() ? cache_tokens_for({&length, 1}, options.layout, options.page_tokens)
                                                : parse_count("--cache-tokens", a.cache_tokens, 1, kMost);
  options.prefill_chunk = parse_count("--prefill-chunk", a.prefill_chunk, 1, kMost);
  return options;
}

struct Outcome {
  Generated generated;
  std::int64_t bytes_sent = 0;   // by rank 0
  std::int64_t cache_bytes = 0;  // on rank 0
};

Outcome run_ranks(const GroupOptions& group, const EngineOptions& options, const LoadedModel& model,
                  const Request& request, const GenerateOptions& generate_options) {
  Outcome outcome;
  run_group(group, [&](RankContext& ctx) {
    Engine engine(ctx, options, model.weights);
    GenerateOptions mine = generate_options;
    if (ctx.rank() != 0) mine.on_token = {};
    Generated generated = generate(ctx, engine, {request}, mine);
    if (ctx.rank() != 0) return;
    outcome.generated = std::move(generated);
    outcome.bytes_sent = ctx.ledger().bytes_sent(Phase::forward);
    outcome.cache_bytes = ctx.memory().current_bytes(MemoryClass::cache);
  });
  return outcome;
}

double rate(std::int64_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

void print_summary(const GenerateArguments& a, const Outcome& o, const GroupOptions& group) {
  const Generated& g = o.generated;
  std::fprintf(stderr, "%s",
               fmt::format("{} tokens of prompt at {:.0f} tokens/s, {} decoded at {:.1f} tokens/s; {}, {}, {} ranks of "
                           "{} threads; cache {} a rank\n",
                           g.prompt_tokens, rate(g.prompt_tokens, g.prefill_s), g.decoded_tokens,
                           rate(g.decoded_tokens, g.decode_s), a.layout, a.dtype, group.num_ranks,
                           threads_per_rank(group), format_bytes(static_cast<double>(o.cache_bytes)))
                   .c_str());
}

json result_json(const GenerateArguments& a, const Outcome& o, const Tokenizer& tokenizer, int threads) {
  const Generated& g = o.generated;
  json result = machine_json(threads, parse_seed(a.seed));
  result.update({{"command", "generate"},
                 {"model", a.model},
                 {"layout", a.layout},
                 {"dtype", a.dtype},
                 {"prompt", a.prompt},
                 {"temperature", a.temperature},
                 {"top_p", a.top_p},
                 {"text", replace_invalid_utf8(tokenizer.decode(g.tokens[0]))},
                 {"token_ids", g.tokens[0]},
                 {"prompt_tokens", g.prompt_tokens},
                 {"decoded_tokens", g.decoded_tokens},
                 {"prefill_seconds", g.prefill_s},
                 {"decode_seconds", g.decode_s},
                 {"bytes_sent_rank_0", o.bytes_sent},
                 {"cache_bytes_per_rank", o.cache_bytes}});
  return result;
}

int run_generate(const GenerateArguments& a) {
  GroupOptions group;
  group.num_ranks = decode_ranks_of(parse_layout(a.layout));
  group.threads_per_rank = a.threads;
  Request request{.max_new_tokens = parse_count("--tokens", a.tokens, 1, std::int64_t{1} << 32),
                  .sampling = sampling_of(a)};
  const LoadedModel model = load_model(a.model, parse_dtype(a.dtype));
  const Tokenizer tokenizer = tokenizer_for(model, a.tokenizer);
  request.prompt = prompt_ids(a, tokenizer);
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  const EngineOptions options = engine_options(a, model, prompt + request.max_new_tokens - 1);
  TextStream text;
  GenerateOptions generate_options;
  if (!a.ignore_eos) generate_options.eos = tokenizer.eos_id();
  generate_options.on_token = [&, begun = false](std::size_t, std::int32_t id) mutable {
    if (!begun) text.write(a.prompt);
    begun = true;
    text.write(tokenizer.decode({&id, 1}));
  };
  const Outcome outcome = run_ranks(group, options, model, request, generate_options);
  text.finish();
  print_summary(a, outcome, group);
  if (!a.json_file.empty()) {
    write_text_atomically(a.json_file, result_json(a, outcome, tokenizer, threads_per_rank(group)).dump(2) + "\n");
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto a = std::make_shared<GenerateArguments>();
  CLI::App* command = app.add_subcommand("generate", "go on from a text, under any decode layout");
  command->add_option("--model", a->model, "directory with config.json, weights and tokenizer.json, or a training run")
      ->required();
  command->add_option("--prompt", a->prompt, "the text to go on from")->required();
  command->add_option("--tokens", a->tokens, "new tokens at most")->capture_default_str();
  command->add_option("--layout", a->layout, "tp:P (heads split) or kvp:P (cache split over the sequence)")
      ->capture_default_str();
  command->add_flag("--greedy", a->greedy, "always the most probable token (the default)");
  command->add_option("--temperature", a->temperature, "sample instead; 1: the model's own probabilities");
  command->add_option("--top-p", a->top_p, "only the most probable tokens, up to this sum")->capture_default_str();
  command->add_option("--seed", a->seed, "of the sampling")->capture_default_str();
  command->add_flag("--ignore-eos", a->ignore_eos, "go on beyond the end-of-text token");
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--cache-dtype", a->cache_dtype, "f32 or bf16; default: --dtype")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--cache-tokens", a->cache_tokens, "room in the cache; default: what is needed");
  command->add_option("--prefill-chunk", a->prefill_chunk, "tokens of the prompt at once")->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->add_option("--json", a->json_file, "write text, ids and times as JSON");
  command->callback([a, &exit_code] { exit_code = run_generate(*a); });
}

}  // namespace isomer
