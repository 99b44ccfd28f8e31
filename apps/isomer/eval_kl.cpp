// isomer eval kl: how far a model under a decode layout lies from a base model, token by token.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/decode_evaluation.h"
#include "apps/isomer/eval.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/token_ids.h"
#include "apps/isomer/tokenizer_choice.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "core/record.h"
#include "eval/decode_scores.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

using nlohmann::json;

struct KlArguments {
  std::string base, model, layout = "tpla", backend = "threads", mode = "decode", ids, tokenizer, json_file;
  std::string window, overlap, limit = "0", batch = "4";
  std::vector<std::string> data;
  int threads = 0;
  bool lossy = false;
};

constexpr std::int64_t kDefaultWindow = 1024, kMost = std::int64_t{1} << 40;
constexpr double kPercentiles[] = {50, 99, 99.9};

void check_pair(const KlArguments& a, const ModelConfig& base, const ModelConfig& model) {
  if (base.vocab_size != model.vocab_size) {
    invalid_argument("--base {} has a vocabulary of {} tokens, --model {} of {}: their distributions can't be compared",
                     a.base, base.vocab_size, a.model, model.vocab_size);
  }
}

/// What --data says, in the base's tokens; or --ids as they stand, one document. Refuses models that don't read the
/// same tokens.
TokenDataset tokens_of(const KlArguments& a, const ModelConfig& config, const std::string& base_directory,
                       const std::string& model_directory) {
  if (a.ids.empty() == a.data.empty()) invalid_argument("give either --data or --ids");
  if (!a.ids.empty()) return TokenDataset::from_tokens({read_token_ids(a.ids, config.vocab_size)}, config.vocab_size);
  const Tokenizer tokenizer = choose_tokenizer(a.tokenizer, a.base, base_directory);
  choose_tokenizer(a.tokenizer.empty() ? base_directory : a.tokenizer, a.model, model_directory);
  return TokenDataset::from_text({a.data.begin(), a.data.end()}, tokenizer, {.lossy = a.lossy});
}

WindowOrder windows_of(const KlArguments& a, const ModelConfig& base, const ModelConfig& model, TokenDataset tokens) {
  std::int64_t window = kDefaultWindow;
  for (const std::int64_t longest : {base.max_position_embeddings, model.max_position_embeddings}) {
    if (longest > 0) window = std::min(window, longest);
  }
  if (!a.window.empty()) window = parse_count("--window", a.window, 1, kMost);
  if (base.max_position_embeddings > 0 && window > base.max_position_embeddings) {
    invalid_argument("--window {}: --base {} has max_position_embeddings {}; read shorter windows", window, a.base,
                     base.max_position_embeddings);
  }
  const std::int64_t overlap = a.overlap.empty() ? window / 2 : parse_count("--overlap", a.overlap, 0, kMost);
  return {std::move(tokens), window, overlap, parse_count("--limit", a.limit, 0, kMost)};
}

double per_token(double sum, const Divergence& d) { return sum / static_cast<double>(d.num_tokens); }

/// "value ± standard error", the error where there is one.
std::string with_error(double value, double error) {
  return std::isnan(error) ? fmt::format("{:.6f}", value) : fmt::format("{:.6f} ± {:.6f}", value, error);
}

void print_result(const KlArguments& a, const Divergence& d) {
  Table table({fmt::format("{} against {}", a.model, a.base), ""});
  table.add({"KL(base ‖ model), mean, nats a token", with_error(d.mean_kl, d.kl_error)});
  for (const double percent : kPercentiles) {
    table.add({fmt::format("  percentile {}", percent), fmt::format("{:.6f}", d.percentile(percent))});
  }
  table.add({"  largest", fmt::format("{:.6f}", d.percentile(100))});
  table.add({"same most probable token",
             fmt::format("{:.2f} %", 100 * per_token(static_cast<double>(d.top1_agreements), d))});
  table.add({"change of the true token's probability, mean", fmt::format("{:+.4f} %", 100 * d.mean_change)});
  table.add({"  root mean square", fmt::format("{:.4f} %", 100 * d.root_mean_square_change)});
  table.add({"perplexity, base (exact prefill)", fmt::format("{:.4f}", std::exp(per_token(d.nats_base, d)))});
  table.add({"perplexity, model", fmt::format("{:.4f}", std::exp(per_token(d.nats_model, d)))});
  table.add(
      {"nats a token, model - base", with_error(per_token(d.nats_model - d.nats_base, d), d.nats_difference_error)});
  table.add({"tokens", fmt::format("{}", d.num_tokens)});
  fmt::print("{}", table.text());
}

json number_or_null(double value) { return std::isnan(value) ? json() : json(value); }

json result_json(const KlArguments& a, const EvaluatedModel& model, const WindowOrder& windows, const Divergence& d,
                 int threads, double seconds) {
  json out = machine_json(threads, 0);
  out.update({{"command", "eval kl"},
              {"base", a.base},
              {"model", a.model},
              {"data", a.data},
              {"layout", model.layout()},
              {"exact", model.exact() || a.mode == name_of(ScoreMode::prefill)},
              {"mode", a.mode},
              {"window", windows.window()},
              {"overlap", windows.overlap()},
              {"windows", windows.num_windows()},
              {"tokens_scored", d.num_tokens},
              {"mean_kl", d.mean_kl},
              {"mean_kl_error", number_or_null(d.kl_error)},
              {"kl_percentiles", json::object()},
              {"largest_kl", d.percentile(100)},
              {"top1_agreement", per_token(static_cast<double>(d.top1_agreements), d)},
              {"mean_probability_change", d.mean_change},
              {"root_mean_square_probability_change", d.root_mean_square_change},
              {"nats_per_token_base", per_token(d.nats_base, d)},
              {"nats_per_token", per_token(d.nats_model, d)},
              {"nats_difference_error", number_or_null(d.nats_difference_error)},
              {"seconds", seconds}});
  if (!a.ids.empty()) out["ids"] = a.ids;
  for (const double percent : kPercentiles) out["kl_percentiles"][fmt::format("{}", percent)] = d.percentile(percent);
  return out;
}

int run_kl(const KlArguments& a, const CommandLine& command_line) {
  Progress progress;
  ScoringOptions options{.mode = parse_score_mode(a.mode)};
  if (!is_decode_layout(a.layout)) {
    invalid_argument("--layout {}: name a layout of decode: {}", a.layout, decode_layout_list());
  }
  progress.show("weights");
  const std::string model_directory = shipped_model(a.model), base_directory = shipped_model(a.base);
  const EvaluatedModel model(a.model, model_directory, a.layout);
  const BaseModel base(base_directory);
  check_pair(a, base.config(), model.config());
  options.batch = parse_count("--batch", a.batch, 1, 1 << 16);
  options.group = {.num_ranks = model.num_ranks(), .threads_per_rank = a.threads};
  options.progress = [&](std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("window {} of {}", done, all));
  };
  progress.show("tokens");
  const WindowOrder windows =
      windows_of(a, base.config(), model.config(), tokens_of(a, base.config(), base_directory, model_directory));
  const bool mpi = a.backend == "mpi";
  if (mpi) options.group.backend = Backend::mpi;
  if (mpi && !under_mpirun()) {
    progress.show("");
    relaunch_under_mpirun(options.group, command_line.argc, command_line.argv);
  }
  const double begin = wall_clock_s();
  const Divergence result = measure_divergence(
      model.config(), windows, options, [&](RankContext& ctx) { return base.source(ctx, windows.window()); },
      [&](RankContext& ctx) { return model.source(ctx, windows.window()); });
  progress.show("");
  if (mpi && mpi_world().rank != 0) return 0;
  print_result(a, result);
  fmt::print("±: standard error from blocks of {} tokens\n{}\n{}", kErrorBlock, model.description(),
             convention_text(windows, options.mode));
  if (!a.json_file.empty()) {
    const json out = result_json(a, model, windows, result, threads_per_rank(options.group), wall_clock_s() - begin);
    write_text_atomically(a.json_file, out.dump(2) + "\n");
  }
  return 0;
}

}  // namespace

void add_eval_kl(CLI::App& eval, const CommandLine& command_line, int& exit_code) {
  auto a = std::make_shared<KlArguments>();
  CLI::App* command = eval.add_subcommand("kl", "KL divergence of a model under a decode layout from a base model");
  command
      ->add_option("--base", a->base,
                   "the model to compare with, of either kind of attention, computed by exact prefill")
      ->required();
  command
      ->add_option("--model", a->model,
                   "for tpla a directory that isomer convert tpla made; else any model with weights")
      ->required();
  command->add_option("--data", a->data, "text files");
  command->add_option("--ids", a->ids, "instead of --data: a file of whitespace-separated token ids, one document");
  command->add_option("--layout", a->layout, decode_layout_list())->capture_default_str();
  command->add_option("--backend", a->backend, "threads, or processes under Open MPI")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command
      ->add_option("--mode", a->mode, "prefill, every-position, or decode: a prefix exact, the others token by token")
      ->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the base's");
  command->add_option("--window", a->window, "tokens read at once; default 1024, or what the models take");
  command->add_option("--overlap", a->overlap, "of them context only, exact under --mode decode; default half");
  command->add_option("--limit", a->limit, "tokens looked at; 0: all")->capture_default_str();
  command->add_option("--batch", a->batch, "windows at once")->capture_default_str();
  command->add_option("--threads", a->threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  command->add_option("--json", a->json_file, "write the same as JSON");
  command->callback([a, command_line, &exit_code] { exit_code = run_kl(*a, command_line); });
}

}  // namespace isomer
