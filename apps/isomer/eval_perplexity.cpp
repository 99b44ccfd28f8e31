// isomer eval perplexity: a checkpoint on held-out text.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/eval.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/units.h"
#include "core/record.h"
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
  std::string model, tokenizer, layout = "explicit", dtype = "f32", attention = "fused", json_file;
  std::string window, overlap = "0", limit = "0", batch = "4";
  std::vector<std::string> data;
  int threads = 0;
  bool lossy = false;
};

constexpr std::int64_t kDefaultWindow = 1024;

Tokenizer tokenizer_of(const PerplexityArguments& a, const std::string& model) {
  if (!a.tokenizer.empty()) return Tokenizer::load(a.tokenizer);
  if (!Tokenizer::is_at(model)) {
    invalid_argument("--model {}: it has no tokenizer.json; name one with --tokenizer", a.model);
  }
  return Tokenizer::load(model);
}

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

/// Bytes of text that each id stands for; none for special tokens.
std::vector<std::int32_t> bytes_of_tokens(const Tokenizer& tokenizer) {
  std::vector<std::int32_t> bytes(static_cast<std::size_t>(tokenizer.vocab_size()), 0);
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(bytes.size()); ++id) {
    if (!tokenizer.token_of(id) || tokenizer.is_special(id)) continue;
    bytes[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(tokenizer.decode({&id, 1}).size());
  }
  return bytes;
}

void print_result(const PerplexityArguments& a, const WindowOrder& windows, const Perplexity& p, double seconds) {
  Table table({a.model, ""});
  table.add({"perplexity a token", fmt::format("{:.4f}", p.per_token())});
  table.add({"nats a token", fmt::format("{:.5f}", p.nats_per_token())});
  table.add({"bits a byte of text", fmt::format("{:.5f}", p.bits_per_byte())});
  table.add({"tokens scored", fmt::format("{}", p.num_tokens)});
  table.add({"bytes of text behind them", fmt::format("{}", p.num_bytes)});
  table.add({"tokens/s", fmt::format("{:.0f}", static_cast<double>(p.num_windows * windows.window()) / seconds)});
  fmt::print("{}", table.text());
  fmt::print(
      "windows of {} tokens, {} of them context that the window before has scored; {} windows, each whole in one\n"
      "forward (prefill), {}, {}. Tokens attend within their document; every token but a document's first is scored "
      "once.\n",
      windows.window(), windows.overlap(), p.num_windows, a.layout, a.dtype);
}

json result_json(const PerplexityArguments& a, const WindowOrder& windows, const Perplexity& p, int threads,
                 double seconds) {
  json result = machine_json(threads, 0);
  result.update({{"command", "eval perplexity"},
                 {"model", a.model},
                 {"data", a.data},
                 {"layout", a.layout},
                 {"dtype", a.dtype},
                 {"attention", a.attention},
                 {"mode", "prefill"},
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
  const Layout layout = parse_layout(a.layout);
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

int run_perplexity(const PerplexityArguments& a) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  Progress progress;
  const std::string model = shipped_model(a.model);
  const Checkpoint checkpoint = checkpoint_of(a, model);
  const ModelConfig config = load_model_config(model);
  const Tokenizer tokenizer = tokenizer_of(a, model);
  const PerplexityOptions options = options_of(a, tokenizer, progress);
  const std::int64_t longest = config.max_position_embeddings;
  const std::int64_t window = a.window.empty() ? (longest > 0 ? std::min(kDefaultWindow, longest) : kDefaultWindow)
                                               : parse_count("--window", a.window, 1, kMost);
  progress.show("tokens");
  const WindowOrder windows(tokens_of(a, tokenizer), window, parse_count("--overlap", a.overlap, 0, kMost),
                            parse_count("--limit", a.limit, 0, kMost));
  progress.show("weights");
  const ModelWeights weights = load_model_weights(checkpoint, config, options.dtype);
  const double begin = wall_clock_s();
  const Perplexity result = measure_perplexity(config, weights, windows, options);
  const double seconds = wall_clock_s() - begin;
  progress.show("");
  print_result(a, windows, result, seconds);
  if (!a.json_file.empty()) {
    const json out = result_json(a, windows, result, threads_per_rank(options.group), seconds);
    write_text_atomically(a.json_file, out.dump(2) + "\n");
  }
  return 0;
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
  command->add_option("--overlap", a->overlap, "of them context only")->capture_default_str();
  command->add_option("--limit", a->limit, "tokens scored at most; 0: all")->capture_default_str();
  command->add_option("--batch", a->batch, "windows a forward")->capture_default_str();
  command->add_option("--layout", a->layout, "explicit, laga:2, …")->capture_default_str();
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
