// isomer eval perplexity: a checkpoint on held-out text.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/decode_evaluation.h"
#include "apps/isomer/eval.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/tokenizer_choice.h"
#include "apps/isomer/units.h"
#include "core/record.h"
#include "eval/decode_scores.h"
#include "eval/perplexity.h"
#include "model/checkpoint.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "sharding/sequence_layout.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct PerplexityArguments {
  std::string model, tokenizer, layout, dtype = "f32", attention = "fused", json_file;
  std::string mode, window, overlap, limit = "0", batch = "4";
  std::vector<std::string> data;
  int threads = 0;
  bool lossy = false;
};

constexpr std::int64_t kDefaultWindow = 1024, kMost = std::int64_t{1} << 40;

std::string layout_of(const PerplexityArguments& a) { return a.layout.empty() ? "explicit" : a.layout; }

Checkpoint checkpoint_of(const PerplexityArguments& a, const std::string& model) {
  std::error_code code;
  if (!fs::is_directory(model, code) && !is_gguf_file(model)) {
    invalid_argument(
        "--model {}: name a directory with config.json, model.safetensors and tokenizer.json, or a GGUF file{}",
        a.model, fs::exists(model, code) ? "" : "; a built-in description has no weights");
  }
  return Checkpoint::open(model);
}

TokenDataset tokens_of(const PerplexityArguments& a, const Tokenizer& tokenizer) {
  if (a.data.size() == 1 && TokenDataset::is_token_file(a.data.front())) {
    TokenDataset data = TokenDataset::open(a.data.front());
    if (data.tokenizer_hash() != 0 && data.tokenizer_hash() != tokenizer.hash()) {
      invalid_argument("--data {}: its tokens were made by another tokenizer than the model's", a.data.front());
    }
    return data;
  }
  return TokenDataset::from_text({a.data.begin(), a.data.end()}, tokenizer, {.lossy = a.lossy});
}

void print_figures(const PerplexityArguments& a, const WindowOrder& windows, const Perplexity& p, double seconds) {
  Table table({a.model, ""});
  table.add({"perplexity a token", fmt::format("{:.4f}", p.per_token())});
  table.add({"nats a token", fmt::format("{:.5f}", p.nats_per_token())});
  table.add({"bits a byte of text", fmt::format("{:.5f}", p.bits_per_byte())});
  table.add({"tokens scored", fmt::format("{}", p.num_tokens)});
  table.add({"bytes of text behind them", fmt::format("{}", p.num_bytes)});
  table.add({"tokens/s", fmt::format("{:.0f}", static_cast<double>(p.num_windows * windows.window()) / seconds)});
  fmt::print("{}", table.text());
}

void print_convention(const PerplexityArguments& a, const WindowOrder& windows, const Perplexity& p) {
  fmt::print(
      "windows of {} tokens, {} of them context that the window before has scored; {} windows, each whole in one\n"
      "forward (prefill), {}, {}. Tokens attend within their document; every token but a document's first is scored "
      "once.\n",
      windows.window(), windows.overlap(), p.num_windows, layout_of(a), a.dtype);
}

json result_json(const PerplexityArguments& a, const WindowOrder& windows, const Perplexity& p, int threads,
                 double seconds) {
  json result = machine_json(threads, 0);
  result.update({{"command", "eval perplexity"},
                 {"model", a.model},
                 {"data", a.data},
                 {"layout", layout_of(a)},
                 {"dtype", a.dtype},
                 {"attention", a.attention},
                 {"mode", "prefill"},
                 {"exact", true},
                 {"window", windows.window()},
                 {"overlap", windows.overlap()},
                 {"windows", p.num_windows},
                 {"tokens_scored", p.num_tokens},
                 {"bytes_scored", p.num_bytes},
                 {"perplexity", p.per_token()},
                 {"nats_per_token", p.nats_per_token()},
                 {"bits_per_byte", p.bits_per_byte()},
                 {"seconds", seconds}});
  return result;
}

PerplexityOptions options_of(const PerplexityArguments& a, const Tokenizer& tokenizer, Progress& progress) {
  PerplexityOptions options;
  const Layout layout = parse_layout(layout_of(a));
  options.group.num_ranks = sequence_layout(sized_layout(layout, 0)).num_ranks();
  options.group.threads_per_rank = a.threads;
  options.layout = to_string(sized_layout(layout, options.group.num_ranks));
  options.dtype = a.dtype == "bf16" ? DType::bf16 : DType::f32;
  options.core = a.attention == "eager" ? AttentionCore::eager : AttentionCore::fused;
  options.batch = parse_count("--batch", a.batch, 1, 1 << 16);
  options.bytes_of_token = bytes_of_tokens(tokenizer);
  options.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("window {} of {}", done, all));
  };
  return options;
}

std::int64_t window_of(const PerplexityArguments& a, const ModelConfig& config) {
  if (!a.window.empty()) return parse_count("--window", a.window, 1, kMost);
  const std::int64_t longest = config.max_position_embeddings;
  return longest > 0 ? std::min(kDefaultWindow, longest) : kDefaultWindow;
}

WindowOrder windows_of(const PerplexityArguments& a, const Tokenizer& tokenizer, std::int64_t window,
                       std::int64_t overlap) {
  if (!a.overlap.empty()) overlap = parse_count("--overlap", a.overlap, 0, kMost);
  return {tokens_of(a, tokenizer), window, overlap, parse_count("--limit", a.limit, 0, kMost)};
}

/// A layout of training: whole windows forward.
int run_prefill(const PerplexityArguments& a) {
  Progress progress;
  const std::string model = shipped_model(a.model);
  const Checkpoint checkpoint = checkpoint_of(a, model);
  const ModelConfig config = load_model_config(model);
  const Tokenizer tokenizer = choose_tokenizer(a.tokenizer, a.model, model);
  const PerplexityOptions options = options_of(a, tokenizer, progress);
  progress.show("tokens");
  const WindowOrder windows = windows_of(a, tokenizer, window_of(a, config), 0);
  progress.show("weights");
  const ModelWeights weights = load_model_weights(checkpoint, config, options.dtype);
  const double begin = wall_clock_s();
  const Perplexity result = measure_perplexity(config, weights, windows, options);
  const double seconds = wall_clock_s() - begin;
  progress.show("");
  print_figures(a, windows, result, seconds);
  print_convention(a, windows, result);
  if (!a.json_file.empty()) {
    const json out = result_json(a, windows, result, threads_per_rank(options.group), seconds);
    write_text_atomically(a.json_file, out.dump(2) + "\n");
  }
  return 0;
}

/// A layout of decode, in a mode.
int run_decode(const PerplexityArguments& a) {
  Progress progress;
  const std::string model = shipped_model(a.model);
  checkpoint_of(a, model);
  const EvaluatedModel evaluated(a.model, model, a.layout, a.dtype == "bf16" ? DType::bf16 : DType::f32);
  const Tokenizer tokenizer = choose_tokenizer(a.tokenizer, a.model, model);
  ScoringOptions options{.mode = a.mode.empty() ? ScoreMode::decode : parse_score_mode(a.mode)};
  options.batch = parse_count("--batch", a.batch, 1, 1 << 16);
  options.group = {.num_ranks = evaluated.num_ranks(), .threads_per_rank = a.threads};
  options.bytes_of_token = bytes_of_tokens(tokenizer);
  options.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("window {} of {}", done, all));
  };
  const std::int64_t window = window_of(a, evaluated.config());
  const WindowOrder windows = windows_of(a, tokenizer, window, window / 2);
  const double begin = wall_clock_s();
  const Perplexity result = score_windows(evaluated.config(), windows, options,
                                          [&](RankContext& ctx) { return evaluated.source(ctx, window); });
  const double seconds = wall_clock_s() - begin;
  progress.show("");
  print_figures(a, windows, result, seconds);
  fmt::print("{}\n{}", evaluated.description(), convention_text(windows, options.mode));
  if (a.json_file.empty()) return 0;
  json out = result_json(a, windows, result, threads_per_rank(options.group), seconds);
  out["layout"] = evaluated.layout();
  out["mode"] = name_of(options.mode);
  out["exact"] = evaluated.exact() || options.mode == ScoreMode::prefill;
  write_text_atomically(a.json_file, out.dump(2) + "\n");
  return 0;
}

int run_perplexity(const PerplexityArguments& a) {
  if (is_decode_layout(layout_of(a))) return run_decode(a);
  if (!a.mode.empty() && parse_score_mode(a.mode) != ScoreMode::prefill) {
    invalid_argument(
        "--mode {} --layout {}: a layout of training computes whole windows (prefill); name one of decode: "
        "{}",
        a.mode, layout_of(a), decode_layout_list());
  }
  return run_prefill(a);
}

}  // namespace

void add_eval_perplexity(CLI::App& eval, int& exit_code) {
  auto a = std::make_shared<PerplexityArguments>();
  CLI::App* command = eval.add_subcommand("perplexity", "perplexity and bits per byte of a checkpoint on text");
  command
      ->add_option("--model", a->model,
                   "directory with config.json, weights and tokenizer.json, a training run, or a GGUF file")
      ->required();
  command->add_option("--data", a->data, "text files, or one token file")->required();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--window", a->window, "tokens read at once; default 1024, or what the model takes");
  command->add_option("--overlap", a->overlap, "of them context only; default 0, under a layout of decode half");
  command
      ->add_option("--limit", a->limit,
                   "tokens looked at, of which a decode layout scores those behind each window's --overlap; 0: all")
      ->capture_default_str();
  command->add_option("--batch", a->batch, "windows a forward")->capture_default_str();
  command->add_option(
      "--layout", a->layout,
      fmt::format("of training (explicit, the default; laga:2, …) or of decode ({})", decode_layout_list()));
  command->add_option("--mode", a->mode,
                      "under a layout of decode: prefill, every-position, or decode (the default): a prefix exact, the "
                      "others token by token");
  command->add_option("--dtype", a->dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command->add_option("--attention", a->attention, "fused or eager")
      ->check(CLI::IsMember({"fused", "eager"}))
      ->capture_default_str();
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  command->add_option("--json", a->json_file, "write the same as JSON");
  command->callback([a, &exit_code] { exit_code = run_perplexity(*a); });
}

}  // namespace isomer
