// isomer generate: goes on from texts under any decode layout, and writes what comes as it comes.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "apps/isomer/commands.h"
#include "apps/isomer/loaded_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/text_stream.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "infer/generate.h"
#include "model/chat_template.h"
#include "sharding/layout.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

using nlohmann::json;

struct GenerateArguments {
  std::vector<std::string> prompts;
  std::string model, tokenizer, layout = "tp:1", prefill_layout, prefill_ranks = "own";
  std::string backend = "threads", dtype = "f32", cache_dtype, json_file;
  std::string seed = "0", tokens = "100", cache_tokens, prefill_chunk = "512";
  double temperature = 0, top_p = 1, timeout_s = 600;
  std::optional<std::string> system;
  bool greedy = false, ignore_eos = false, chat = false;
  int ranks = 0, threads = 0;
};

constexpr std::int64_t kMost = std::int64_t{1} << 32;

/// Everything but the weights, held against one another before they are read and ranks are started.
struct Prepared {
  FoundModel model;
  Tokenizer tokenizer;
  EngineOptions engine;
  std::optional<SeparatedOptions> separated;  // prefill under a layout of its own
  GroupOptions group;
  std::vector<TextRequest> requests;
};

Sampling sampling_of(const GenerateArguments& a, std::size_t request) {
  if (a.greedy && a.temperature != 0) {
    invalid_argument("--greedy with --temperature {}: greedy is temperature 0; give one of them", a.temperature);
  }
  if (a.top_p != 1 && a.temperature == 0) {
    invalid_argument("--top-p {}: nothing is sampled at temperature 0; give --temperature too", a.top_p);
  }
  const Sampling sampling{.temperature = a.temperature, .top_p = a.top_p, .seed = parse_seed(a.seed) + request};
  check_sampling(sampling);
  return sampling;
}

/// The model's chat template where --chat asks for it.
std::optional<ChatTemplate> chat_of(const GenerateArguments& a, const FoundModel& model) {
  if (a.system && !a.chat) invalid_argument("--system without --chat: a prompt as it stands has no system message");
  if (!a.chat) return std::nullopt;
  const std::string& place = a.tokenizer.empty() ? model.directory : a.tokenizer;
  return ChatTemplate::parse(Tokenizer::texts_at(place).config_json, place);
}

std::vector<TextRequest> requests_of(const GenerateArguments& a, const Tokenizer& tokenizer,
                                     const std::optional<ChatTemplate>& chat) {
  std::vector<TextRequest> requests;
  if (a.prompts.empty()) invalid_argument("--prompt is empty: give some text to go on from");
  for (const std::string& prompt : a.prompts) {
    const std::string which = a.prompts.size() == 1 ? "" : fmt::format(" (number {})", requests.size() + 1);
    if (prompt.empty()) invalid_argument("--prompt{} is empty: give some text to go on from", which);
    if (const auto at = invalid_utf8_at(prompt)) {
      invalid_argument("--prompt{} is not UTF-8: byte {} is ill-formed", which, *at);
    }
    requests.push_back(
        {.prompt = chat ? tokenizer.encode(chat->prompt(prompt, a.system)) : tokenizer.encode(prompt, true),
         .max_new_tokens = parse_count("--tokens", a.tokens, 1, kMost),
         .sampling = sampling_of(a, requests.size())});
  }
  return requests;
}

/// Room in the cache: what is needed, or what was asked for, in whole pages.
std::int64_t cache_tokens_of(const GenerateArguments& a, const EngineOptions& options,
                             const std::vector<std::int64_t>& lengths) {
  const std::int64_t need = cache_tokens_for(lengths, options.layout, options.page_tokens);
  if (a.cache_tokens.empty()) return need;
  const std::int64_t given = parse_count("--cache-tokens", a.cache_tokens, 1, kMost);
  const CacheShards shards = cache_shards_of(options.layout);
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const std::int64_t pages = cache_pages_for(lengths, options.layout, options.page_tokens);
  if (given >= std::min(tokens, need) && pages_for(given, options.page_tokens, shards) >= pages) return given;
  invalid_argument(
      "--cache-tokens {}: the cache is too small: the prompts and what is asked for take {} tokens, a sequence whole "
      "pages of {}; give at least {}",
      given, tokens, options.page_tokens * shards.num_slices, need);
}

EngineOptions engine_options(const GenerateArguments& a, const FoundModel& model,
                             const std::vector<TextRequest>& requests) {
  EngineOptions options{.config = model.config};
  if ((a.layout + a.prefill_layout).find("tpla") != std::string::npos) options.tpla = find_tpla(model);
  options.layout = layout_for(a.layout, model.config, options.tpla.get());
  const std::string reason = why_step_unfit(options.layout, model.config, options.tpla.get());
  if (!reason.empty()) invalid_argument("--layout {}: {}", a.layout, reason);
  if (!a.cache_dtype.empty()) options.cache_dtype = parse_dtype(a.cache_dtype);
  std::vector<std::int64_t> lengths;
  for (const TextRequest& r : requests) {
    lengths.push_back(static_cast<std::int64_t>(r.prompt.size()) + r.max_new_tokens - 1);
  }
  options.cache_tokens = cache_tokens_of(a, options, lengths);
  options.prefill_chunk = parse_count("--prefill-chunk", a.prefill_chunk, 1, kMost);
  check_requests(options, requests);
  return options;
}

std::optional<SeparatedOptions> separated_options(const GenerateArguments& a, const EngineOptions& engine) {
  if (a.prefill_layout.empty()) {
    if (a.prefill_ranks != "own")
      invalid_argument("--prefill-ranks {}: it goes with --prefill-layout", a.prefill_ranks);
    return std::nullopt;
  }
  SeparatedOptions options{.prefill = engine, .decode = engine, .apart = a.prefill_ranks == "own"};
  options.prefill.layout = layout_for(a.prefill_layout, engine.config, engine.tpla.get());
  options.prefill.cache_tokens = 0;
  const std::string reason = why_step_unfit(options.prefill.layout, engine.config, engine.tpla.get());
  if (!reason.empty()) invalid_argument("--prefill-layout {}: {}", a.prefill_layout, reason);
  return options;
}

Prepared prepare(const GenerateArguments& a) {
  FoundModel model = find_model(a.model);
  Tokenizer tokenizer = tokenizer_for(model, a.tokenizer);
  std::vector<TextRequest> requests = requests_of(a, tokenizer, chat_of(a, model));
  EngineOptions engine = engine_options(a, model, requests);
  std::optional<SeparatedOptions> separated = separated_options(a, engine);
  GroupOptions group;
  group.backend = a.backend == "mpi" ? Backend::mpi : Backend::threads;
  group.num_ranks = separated ? separated->num_ranks() : engine.layout.devices();
  if (a.ranks > 0 && a.ranks != group.num_ranks) {
    invalid_argument("--ranks {}: the layout {} has {}", a.ranks, a.layout, group.num_ranks);
  }
  group.threads_per_rank = a.threads;
  group.timeout_s = a.timeout_s;
  return {std::move(model), std::move(tokenizer), std::move(engine), std::move(separated), group, std::move(requests)};
}

struct Outcome {
  Generated generated;
  std::int64_t bytes_sent = 0;  // by rank 0
};

Outcome run_ranks(const Prepared& p, DType dtype, const GenerateOptions& generate_options) {
  const ModelWeights weights = load_weights(p.model, dtype);
  Outcome outcome;
  run_group(p.group, [&](RankContext& ctx) {
    GenerateOptions mine = generate_options;
    if (ctx.rank() != 0) mine.on_token = {};
    Generated generated;
    if (p.separated) {
      generated = generate_separated(ctx, *p.separated, weights, p.requests, mine);
    } else {
      Engine engine(ctx, p.engine, weights);
      generated = generate(ctx, engine, p.requests, mine);
    }
    if (ctx.rank() != 0) return;
    outcome.generated = std::move(generated);
    outcome.bytes_sent = ctx.ledger().bytes_sent(Phase::forward);
  });
  return outcome;
}

double rate(std::int64_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }

/// Whether decoding computes what one rank does; prefill always does.
bool is_exact(const Prepared& p) { return is_exact(p.engine.layout, p.engine.config, p.engine.tpla.get()); }

void print_summary(const GenerateArguments& a, const Outcome& o, const Prepared& p) {
  const GroupOptions& group = p.group;
  const Generated& g = o.generated;
  const std::string text = fmt::format(
      "{} tokens of prompt at {:.0f} tokens/s, {} decoded at {:.1f} tokens/s; {}, {}, {} ranks ({}) of {} threads; "
      "cache {} a rank{}\n",
      g.prompt_tokens, rate(g.prompt_tokens, g.prefill_s), g.decoded_tokens, rate(g.decoded_tokens, g.decode_s),
      a.layout, a.dtype, group.num_ranks, name_of(group.backend), threads_per_rank(group),
      format_bytes(static_cast<double>(g.cache_bytes)), is_exact(p) ? "" : "; NOT EXACT");
  std::fputs(text.c_str(), stderr);
  if (const std::string note = cache_copies_note(p.engine.layout, p.engine.config); !note.empty()) {
    std::fputs((note + "\n").c_str(), stderr);
  }
}

json result_json(const GenerateArguments& a, const Outcome& o, const Prepared& p) {
  const Generated& g = o.generated;
  json result = machine_json(threads_per_rank(p.group), parse_seed(a.seed));
  json sequences = json::array();
  for (std::size_t i = 0; i < a.prompts.size(); ++i) {
    sequences.push_back({{"prompt", a.prompts[i]},
                         {"text", replace_invalid_utf8(p.tokenizer.decode(g.tokens[i]))},
                         {"token_ids", g.tokens[i]}});
  }
  result.update({{"command", "generate"},
                 {"model", a.model},
                 {"layout", a.layout},
                 {"exact", is_exact(p)},
                 {"prefill_layout", a.prefill_layout.empty() ? a.layout : a.prefill_layout},
                 {"backend", a.backend},
                 {"dtype", a.dtype},
                 {"temperature", a.temperature},
                 {"top_p", a.top_p},
                 {"sequences", std::move(sequences)},
                 {"prompt_tokens", g.prompt_tokens},
                 {"decoded_tokens", g.decoded_tokens},
                 {"decode_steps", g.decode_steps},
                 {"prefill_seconds", g.prefill_s},
                 {"decode_seconds", g.decode_s},
                 {"bytes_sent_rank_0", o.bytes_sent},
                 {"cache_bytes_per_rank", g.cache_bytes}});
  return result;
}

/// One text is written as it comes; several, one after another when all are there.
Outcome run_and_print(const GenerateArguments& a, const Prepared& p) {
  TextStream text;
  GenerateOptions options;
  if (!a.ignore_eos) options.eos = p.tokenizer.eos_id();
  if (a.prompts.size() == 1) {
    options.on_token = [&, begun = false](std::size_t, std::int32_t id) mutable {
      if (!begun && !a.chat) text.write(a.prompts[0]);
      begun = true;
      text.write(p.tokenizer.decode({&id, 1}));
    };
  }
  Outcome outcome = run_ranks(p, parse_dtype(a.dtype), options);
  if (p.group.backend == Backend::mpi && mpi_world().rank != 0) return outcome;
  if (a.prompts.size() == 1) {
    text.finish();
    return outcome;
  }
  for (std::size_t i = 0; i < a.prompts.size(); ++i) {
    fmt::print("[{}] {}{}\n", i + 1, a.chat ? "" : a.prompts[i],
               replace_invalid_utf8(p.tokenizer.decode(outcome.generated.tokens[i])));
  }
  return outcome;
}

int run_generate(GenerateArguments a, const CommandLine& command_line) {
  const Prepared prepared = prepare(a);
  for (std::string* layout : {&a.layout, &a.prefill_layout}) *layout = without_blanks(*layout);
  const bool mpi = prepared.group.backend == Backend::mpi;
  if (mpi && !under_mpirun()) relaunch_under_mpirun(prepared.group, command_line.argc, command_line.argv);
  const Outcome outcome = run_and_print(a, prepared);
  if (mpi && mpi_world().rank != 0) return 0;
  print_summary(a, outcome, prepared);
  if (!a.json_file.empty()) {
    write_text_atomically(a.json_file, result_json(a, outcome, prepared).dump(2) + "\n");
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, const CommandLine& command_line, int& exit_code) {
  auto a = std::make_shared<GenerateArguments>();
  CLI::App* command = app.add_subcommand("generate", "go on from a text, under any decode layout");
  command
      ->add_option("--model", a->model,
                   "directory with config.json, weights and tokenizer.json, a training run, or a GGUF file")
      ->required();
  command->add_option("--prompt", a->prompts, "the text to go on from; may be given several times")
      ->required()
      ->allow_extra_args(false);
  command->add_flag("--chat", a->chat, "prompts are questions: written down by the model's chat template (ChatML)");
  command->add_option("--system", a->system, "with --chat: the system message; empty: none; default: the template's");
  command->add_option("--tokens", a->tokens, "new tokens of each text at most")->capture_default_str();
  command->add_option("--layout", a->layout, "how decoding is spread over ranks (docs/inference.md)")
      ->capture_default_str();
  command->add_option("--prefill-layout", a->prefill_layout,
                      "read prompts under another layout, and hand the cache over; default: --layout");
  command->add_option("--prefill-ranks", a->prefill_ranks, "its ranks: own, behind those of --layout, or the same ones")
      ->check(CLI::IsMember({"own", "same"}))
      ->capture_default_str();
  command->add_option("--ranks", a->ranks, "checked against the layout, which says it")->check(CLI::Range(1, 4096));
  command->add_option("--backend", a->backend, "threads, or processes under Open MPI")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command->add_flag("--greedy", a->greedy, "always the most probable token (the default)");
  command->add_option("--temperature", a->temperature, "sample instead; 1: the model's own probabilities");
  command->add_option("--top-p", a->top_p, "only the most probable tokens, up to this sum")->capture_default_str();
  command->add_option("--seed", a->seed, "of the sampling; text number i has seed + i - 1")->capture_default_str();
  command->add_flag("--ignore-eos", a->ignore_eos, "go on beyond the end-of-text token");
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--cache-dtype", a->cache_dtype, "f32 or bf16; default: --dtype")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--cache-tokens", a->cache_tokens, "room in the cache; default: what is needed");
  command->add_option("--prefill-chunk", a->prefill_chunk, "tokens of a prompt at once")->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--timeout", a->timeout_s, "seconds without a sign of life after which a rank has stalled")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->add_option("--json", a->json_file, "write texts, ids and times as JSON");
  command->callback([a, command_line, &exit_code] { exit_code = run_generate(*a, command_line); });
}

}  // namespace isomer
