// isomer convert tpla: rotates the latent of an MLA checkpoint for sharded decode, and says how far the result lies
// from the original.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/convert.h"
#include "apps/isomer/head_report.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/tokenizer_choice.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "convert/compare_logits.h"
#include "convert/convert_tpla.h"
#include "core/record.h"
#include "eval/heads.h"
#include "model/tokenizer.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct ConvertArguments {
  std::string model, out, tokenizer, json_file;
  std::string transform = "pca", rms = "exact", kappa = "one";
  std::string shared_columns = "0", tokens = "64K", window, held_out = "8", seed = "1", align = "0";
  std::vector<std::string> calibrate;
  int shards = 2, threads = 0;
  bool lossy = false;
};

struct Report {
  LogitDifference difference;
  std::vector<LayerHeads> heads;
};

TplaConversion conversion_of(const ConvertArguments& a, const std::string& model, Progress& progress) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  TplaConversion c{.model = model, .out = a.out};
  c.options = {.transform = parse_tpla_transform(a.transform),
               .num_shards = a.shards,
               .shared_columns = parse_count("--shared-columns", a.shared_columns, 0, kMost),
               .rms = parse_tpla_rms(a.rms),
               .kappa = parse_tpla_kappa(a.kappa)};
  c.calibration = {.tokens = parse_count("--calibration-tokens", a.tokens, 1, kMost),
                   .window = a.window.empty() ? 0 : parse_count("--window", a.window, 1, kMost),
                   .held_out_windows = parse_count("--held-out", a.held_out, 1, kMost),
                   .seed = parse_seed(a.seed)};
  c.alignment.steps = parse_count("--align", a.align, 0, 1 << 20);
  for (const std::string& path : a.calibrate) c.files.push_back(describe_calibration_file(path));
  c.num_threads = threads_per_rank({.num_ranks = 1, .threads_per_rank = a.threads});
  c.progress = [&progress](const std::string& what, std::int64_t done, std::int64_t all) {
    progress.show(fmt::format("{} {} of {}", what, done, all));
  };
  return c;
}

Report report_on(const TplaConversion& c, const TplaConversionResult& result) {
  const ModelConfig config = load_model_config(c.model.string());
  const ModelWeights before = load_model_weights(Checkpoint::open(c.model), config, DType::f32);
  const ModelWeights after = load_model_weights(Checkpoint::open(c.out), config, DType::f32);
  const std::vector<Sample>& text = result.windows.held_out;
  return {compare_logits(config, before, after, text, c.num_threads, c.progress),
          measure_heads(config, after, c.options, result.side.layers, text, c.num_threads, c.progress)};
}

void print_report(const ConvertArguments& a, const TplaConversion& c, const TplaConversionResult& result,
                  const Report& report) {
  const LogitDifference& l = report.difference;
  const double tokens = static_cast<double>(l.num_tokens), targets = static_cast<double>(l.num_targets);
  fmt::print("{}: {}\n", a.out, tpla_line(c.options, load_model_config(c.model.string())));
  fmt::print("calibrated on {} tokens in windows of {}, seed {}; the report is of {} others, in float32\n\n",
             result.side.calibration_tokens, result.windows.window, result.side.seed, l.num_tokens);
  Table table({"rewritten beside original, whole attention", ""});
  table.add({"largest difference of a logit", fmt::format("{:.3g}", l.largest)});
  table.add({"largest logit", fmt::format("{:.3g}", l.largest_logit)});
  table.add({"KL, mean, nats a token", fmt::format("{:.3g}", l.mean_divergence)});
  table.add({"KL, largest", fmt::format("{:.3g}", l.largest_divergence)});
  table.add({"same first choice", fmt::format("{:.2f} %", 100 * static_cast<double>(l.top1_agreements) / tokens)});
  table.add({"perplexity, original", fmt::format("{:.4f}", std::exp(l.nats_first / targets))});
  table.add({"perplexity, rewritten", fmt::format("{:.4f}", std::exp(l.nats_second / targets))});
  fmt::print(
      "{}\nwhat a shard sees in decode (not exact but for one shard, or all columns shared); means over heads:\n{}",
      table.text(), head_table(report.heads, c.options, false));
  for (std::size_t layer = 0; layer < result.aligned.size(); ++layer) {
    fmt::print("{}layer {}: error of the sharded output {:.5f} of its square before, {:.5f} after\n",
               layer == 0 ? "aligned: whole attention is no longer the original's\n" : "", layer,
               result.aligned[layer].before, result.aligned[layer].after);
  }
  if (result.dequantised > 0) fmt::print("{} FP8 tensors are written as BF16\n", result.dequantised);
}

/// [{before, after}] by layer.
json alignment_json(const TplaConversionResult& result) {
  json layers = json::array();
  for (const AlignedLayer& layer : result.aligned) layers.push_back({{"before", layer.before}, {"after", layer.after}});
  return layers;
}

json report_json(const ConvertArguments& a, const TplaConversion& c, const TplaConversionResult& result,
                 const Report& report, double seconds) {
  const LogitDifference& l = report.difference;
  json files = json::array();
  for (const CalibrationFile& file : result.side.calibration) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"hash", fmt::format("{:016x}", file.hash)}});
  }
  json out = machine_json(c.num_threads, 0);
  out.update(tpla_json(c.options, load_model_config(c.model.string())));
  out.update(
      {{"command", "convert tpla"},
       {"model", a.model},
       {"out", a.out},
       {"seed", result.side.seed},
       {"calibration", {{"files", files}, {"window", result.side.window}, {"tokens", result.side.calibration_tokens}}},
       {"weights_hash", fmt::format("{:016x}", result.side.weights_hash)},
       {"fp8_dequantised", result.dequantised},
       {"align_steps", result.side.align_steps},
       {"alignment", alignment_json(result)},
       {"report",
        {{"tokens", l.num_tokens},
         {"largest_logit_difference", l.largest},
         {"largest_logit", l.largest_logit},
         {"mean_kl", l.mean_divergence},
         {"largest_kl", l.largest_divergence},
         {"top1_agreement", static_cast<double>(l.top1_agreements) / static_cast<double>(l.num_tokens)},
         {"nats_per_token_original", l.nats_first / static_cast<double>(l.num_targets)},
         {"nats_per_token_rewritten", l.nats_second / static_cast<double>(l.num_targets)}}},
       {"layers", heads_json(report.heads, c.options)},
       {"seconds", seconds}});
  return out;
}

int run_convert(const ConvertArguments& a) {
  Progress progress;
  const double begin = wall_clock_s();
  const std::string model = shipped_model(a.model);
  const TplaConversion conversion = conversion_of(a, model, progress);
  progress.show("tokens");
  const TokenDataset text = TokenDataset::from_text({a.calibrate.begin(), a.calibrate.end()},
                                                    choose_tokenizer(a.tokenizer, a.model, model), {.lossy = a.lossy});
  const TplaConversionResult result = convert_tpla(conversion, text);
  const Report report = report_on(conversion, result);
  progress.show("");
  print_report(a, conversion, result, report);
  if (!a.json_file.empty()) {
    const json out = report_json(a, conversion, result, report, wall_clock_s() - begin);
    write_text_atomically(a.json_file, out.dump(2) + "\n");
  }
  return 0;
}

}  // namespace

void add_convert_tpla(CLI::App& convert, int& exit_code) {
  auto a = std::make_shared<ConvertArguments>();
  CLI::App* command =
      convert.add_subcommand("tpla", "rotate the latent of an MLA checkpoint and cut it for sharded decode");
  command->add_option("--model", a->model, "directory with config.json, weights and tokenizer.json, or a training run")
      ->required();
  command->add_option("--calibrate", a->calibrate, "text files to calibrate on")->required();
  command->add_option("--out", a->out, "directory to make")->required();
  command->add_option("--shards", a->shards, "g, which divides kv_lora_rank less the shared columns")
      ->capture_default_str();
  command->add_option("--transform", a->transform, "none, hadamard, pca, pca-centred or query-aware")
      ->capture_default_str();
  command->add_option("--shared-columns", a->shared_columns, "leading columns that stand on every rank")
      ->capture_default_str();
  command->add_option("--rms", a->rms, "exact, or sliced: estimated from a rank's own columns")->capture_default_str();
  command->add_option("--kappa", a->kappa, "one, lsq, share or inverse-share")->capture_default_str();
  command->add_option("--calibration-tokens", a->tokens, "at most")->capture_default_str();
  command->add_option("--window", a->window, "tokens read at once; default 512, or what the model takes");
  command->add_option("--held-out", a->held_out, "windows that the report is of, at most")->capture_default_str();
  command->add_option("--align", a->align, "steps that kv_b of a layer is trained for; 0: the rewrite stays exact")
      ->capture_default_str();
  command->add_option("--seed", a->seed, "which windows; hadamard's signs")->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--threads", a->threads, "default: the cores")->check(CLI::Range(0, 1024));
  command->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  command->add_option("--json", a->json_file, "write the report as JSON");
  command->callback([a, &exit_code] { exit_code = run_convert(*a); });
}

}  // namespace isomer
