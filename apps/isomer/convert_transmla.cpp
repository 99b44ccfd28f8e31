// isomer convert transmla: grouped-query attention into latent attention, with the loss of every step.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/convert.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/tokenizer_choice.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "convert/convert_transmla.h"
#include "core/record.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

using nlohmann::json;

struct TransMlaArguments {
  std::string model, out, tokenizer, json_file, dtype = "f32";
  std::string rank, rope, freqfold = "1", tokens = "16K", window, held_out = "4", seed = "1", align_tokens = "8K";
  std::vector<std::string> calibrate;
  double balance = 1, align_minutes = 0, align_rate = 1e-3;
  std::int64_t align_steps = 0;
  int threads = 0;
  bool lossy = false;
};

TransMlaConversion conversion_of(const TransMlaArguments& a, const std::string& model, Progress& progress) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const ModelConfig config = load_model_config(model);
  TransMlaConversion c{.model = model, .out = a.out};
  c.options = {
      .kv_lora_rank = parse_count("--kv-lora-rank", a.rank, 1, kMost),
      .qk_rope_head_dim = a.rope.empty() ? config.head_dim : parse_count("--qk-rope-head-dim", a.rope, 1, kMost),
      .freqfold = parse_count("--freqfold", a.freqfold, 1, kMost),
      .balance = a.balance};
  c.calibration = {.tokens = parse_count("--calibration-tokens", a.tokens, 1, kMost),
                   .window = a.window.empty() ? 0 : parse_count("--window", a.window, 1, kMost),
                   .held_out_windows = parse_count("--held-out", a.held_out, 1, kMost),
                   .seed = parse_seed(a.seed)};
  c.align = {.minutes = a.align_minutes,
             .steps = a.align_steps,
             .tokens = parse_count("--align-tokens", a.align_tokens, 1, kMost),
             .learning_rate = a.align_rate};
  c.dtype = a.dtype == "bf16" ? DType::bf16 : DType::f32;
  c.num_threads = threads_per_rank({.num_ranks = 1, .threads_per_rank = a.threads});
  c.progress = [&progress](const std::string& what, std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("{} {} of {}", what, done, all));
  };
  return c;
}

double share(std::int64_t part, std::int64_t all) { return static_cast<double>(part) / static_cast<double>(all); }

void print_report(const TransMlaArguments& a, const TransMlaConversion& c, const TransMlaResult& result) {
  const LogitDifference& first = result.steps.front().difference;
  fmt::print("{}: kv_lora_rank {}, qk_rope_head_dim {}, freqfold {}, balance {}\n", a.out, c.options.kv_lora_rank,
             c.options.qk_rope_head_dim, c.options.freqfold, c.options.balance);
  fmt::print(
      "calibrated on {} tokens in windows of {}, seed {}; measured on {} others, in float32, against the original\n\n",
      result.calibration_tokens, result.window, a.seed, first.num_tokens);
  Table table({"step", "cached", "perplexity", "KL, mean", "same first choice", "largest logit difference"});
  table.add({"original", "", fmt::format("{:.4f}", std::exp(first.nats_first / static_cast<double>(first.num_targets))),
             "", "", ""});
  for (const TransMlaReport& step : result.steps) {
    const LogitDifference& l = step.difference;
    table.add({step.step, fmt::format("{}", step.cached),
               fmt::format("{:.4f}", std::exp(l.nats_second / static_cast<double>(l.num_targets))),
               fmt::format("{:.3g}", l.mean_divergence),
               fmt::format("{:.2f} %", 100 * share(l.top1_agreements, l.num_tokens)),
               fmt::format("{:.3g}", l.largest)});
  }
  fmt::print("{}cached: elements a token and layer. KL in nats a token, original from converted.\n", table.text());
  if (result.aligned.empty()) return;
  double before = 0, after = 0;
  for (const AlignedBlock& layer : result.aligned) {
    before += layer.error_before;
    after += layer.error_after;
  }
  const auto layers = static_cast<double>(result.aligned.size());
  fmt::print(
      "alignment: {} steps a layer; squared error of an attention block, mean over layers: {:.4f} before, {:.4f} "
      "after\n",
      result.aligned.front().steps, before / layers, after / layers);
}

json report_json(const TransMlaArguments& a, const TransMlaConversion& c, const TransMlaResult& result,
                 double seconds) {
  json steps = json::array(), aligned = json::array();
  for (const TransMlaReport& step : result.steps) {
    const LogitDifference& l = step.difference;
    steps.push_back({{"step", step.step},
                     {"cached_elements", step.cached},
                     {"tokens", l.num_tokens},
                     {"nats_per_token_original", l.nats_first / static_cast<double>(l.num_targets)},
                     {"nats_per_token", l.nats_second / static_cast<double>(l.num_targets)},
                     {"mean_kl", l.mean_divergence},
                     {"largest_kl", l.largest_divergence},
                     {"top1_agreement", share(l.top1_agreements, l.num_tokens)},
                     {"largest_logit_difference", l.largest}});
  }
  for (const AlignedBlock& layer : result.aligned) {
    aligned.push_back(
        {{"error_before", layer.error_before}, {"error_after", layer.error_after}, {"steps", layer.steps}});
  }
  json out = machine_json(c.num_threads, 0);
  out.update(
      {{"command", "convert transmla"},
       {"model", a.model},
       {"out", a.out},
       {"kv_lora_rank", c.options.kv_lora_rank},
       {"qk_rope_head_dim", c.options.qk_rope_head_dim},
       {"freqfold", c.options.freqfold},
       {"balance", c.options.balance},
       {"calibration", {{"files", a.calibrate}, {"window", result.window}, {"tokens", result.calibration_tokens}}},
       {"seed", c.calibration.seed},
       {"steps", steps},
       {"alignment", {{"minutes", c.align.minutes}, {"layers", aligned}}},
       {"seconds", seconds}});
  return out;
}

int run_transmla(const TransMlaArguments& a) {
  Progress progress;
  const double begin = wall_clock_s();
  const std::string model = shipped_model(a.model);
  const TransMlaConversion conversion = conversion_of(a, model, progress);
  progress.show("tokens");
  const Tokenizer tokenizer = choose_tokenizer(a.tokenizer, a.model, model);
  const TokenDataset text =
      TokenDataset::from_text({a.calibrate.begin(), a.calibrate.end()}, tokenizer, {.lossy = a.lossy});
  const TransMlaResult result = convert_transmla(conversion, text);
  progress.show("");
  print_report(a, conversion, result);
  if (!a.json_file.empty()) {
    write_text_atomically(a.json_file, report_json(a, conversion, result, wall_clock_s() - begin).dump(2) + "\n");
  }
  return 0;
}

}  // namespace

void add_convert_transmla(CLI::App& convert, int& exit_code) {
  auto a = std::make_shared<TransMlaArguments>();
  CLI::App* command = convert.add_subcommand("transmla", "grouped-query attention into latent attention");
  command->add_option("--model", a->model, "a directory, a GGUF file or a training run, with grouped-query attention")
      ->required();
  command->add_option("--calibrate", a->calibrate, "text files to calibrate on")->required();
  command->add_option("--out", a->out, "directory to make")->required();
  command->add_option("--kv-lora-rank", a->rank, "d, of the latent that is cached")->required();
  command->add_option("--qk-rope-head-dim", a->rope, "r, of the one rope key; a divisor of head_dim, the default");
  command->add_option("--freqfold", a->freqfold, "neighbouring frequencies taken as one; a multiple of head_dim/r")
      ->capture_default_str();
  command->add_option("--balance", a->balance, "weight of keys against values in the PCA")->capture_default_str();
  command->add_option("--calibration-tokens", a->tokens, "at most")->capture_default_str();
  command->add_option("--window", a->window, "tokens read at once; default 512, or what the model takes");
  command->add_option("--held-out", a->held_out, "windows that the report is of, at most")->capture_default_str();
  command->add_option("--align-minutes", a->align_minutes,
                      "train each attention block towards the original's, so long");
  command->add_option("--align-steps", a->align_steps, "instead of minutes: steps a layer, the same on any machine");
  command->add_option("--align-tokens", a->align_tokens, "of the calibration text, at most")->capture_default_str();
  command->add_option("--align-rate", a->align_rate, "learning rate")->capture_default_str();
  command->add_option("--dtype", a->dtype, "of the weights written")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->add_option("--seed", a->seed, "which windows")->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--threads", a->threads, "default: the cores")->check(CLI::Range(0, 1024));
  command->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  command->add_option("--json", a->json_file, "write the report as JSON");
  command->callback([a, &exit_code] { exit_code = run_transmla(*a); });
}

}  // namespace isomer
