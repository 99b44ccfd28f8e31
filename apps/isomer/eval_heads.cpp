// isomer eval heads: per layer and head, what the shards of a converted checkpoint see of the logits.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "apps/isomer/eval.h"
#include "apps/isomer/head_report.h"
#include "apps/isomer/shipped_model.h"
#include "apps/isomer/table.h"
#include "apps/isomer/tokenizer_choice.h"
#include "apps/isomer/units.h"
#include "comm/group.h"
#include "convert/side_file.h"
#include "core/record.h"
#include "eval/heads.h"
#include "model/tokenizer.h"
#include "study/machine.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

using nlohmann::json;

struct HeadsArguments {
  std::string model, tokenizer, json_file, window, tokens = "4K", seed = "1";
  std::vector<std::string> data;
  int threads = 0;
  bool lossy = false, every_head = false;
};

int run_heads(const HeadsArguments& a) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  Progress progress;
  const double begin = wall_clock_s();
  const std::string model = shipped_model(a.model);
  const ModelConfig config = load_model_config(model);
  const Checkpoint checkpoint = Checkpoint::open(model);
  const TplaSideFile side = load_tpla_side_file(model, config, checkpoint);
  const Tokenizer tokenizer = choose_tokenizer(a.tokenizer, a.model, model);
  const TokenDataset text = TokenDataset::from_text({a.data.begin(), a.data.end()}, tokenizer, {.lossy = a.lossy});
  const CalibrationWindows windows =
      calibration_windows(text, config,
                          {.tokens = parse_count("--tokens", a.tokens, 1, kMost),
                           .window = a.window.empty() ? 0 : parse_count("--window", a.window, 1, kMost),
                           .held_out_windows = 1,
                           .seed = parse_seed(a.seed)});
  const int threads = threads_per_rank({.num_ranks = 1, .threads_per_rank = a.threads});
  const std::vector<LayerHeads> layers =
      measure_heads(config, load_model_weights(checkpoint, config, DType::f32), side.options, side.layers,
                    windows.calibration, threads, [&](const std::string& what, std::int64_t done, std::int64_t all) {
                      progress.show(fmt::format("{} {} of {}", what, done, all));
                    });
  progress.show("");
  const std::int64_t tokens = std::ssize(windows.calibration) * windows.window;
  fmt::print("{}: {}\n{} tokens in windows of {}, seed {}; logits in float64 of float32 activations\n\n{}", a.model,
             tpla_line(side.options, config), tokens, windows.window, a.seed,
             head_table(layers, side.options, a.every_head));
  if (a.json_file.empty()) return 0;
  json out = machine_json(threads, 0);
  out.update(tpla_json(side.options, config));
  out.update({{"command", "eval heads"},
              {"model", a.model},
              {"data", a.data},
              {"window", windows.window},
              {"tokens", tokens},
              {"seed", parse_seed(a.seed)},
              {"layers", heads_json(layers, side.options)},
              {"seconds", wall_clock_s() - begin}});
  write_text_atomically(a.json_file, out.dump(2) + "\n");
  return 0;
}

}  // namespace

void add_eval_heads(CLI::App& eval, int& exit_code) {
  auto a = std::make_shared<HeadsArguments>();
  CLI::App* command = eval.add_subcommand("heads", "what the shards of a converted checkpoint see, per layer and head");
  command->add_option("--model", a->model, "directory that isomer convert tpla made")->required();
  command->add_option("--data", a->data, "text files")->required();
  command->add_option("--tokenizer", a->tokenizer, "tokenizer.json or its directory; default: the model's");
  command->add_option("--tokens", a->tokens, "to look at, at most")->capture_default_str();
  command->add_option("--window", a->window, "tokens read at once; default 512, or what the model takes");
  command->add_option("--seed", a->seed, "which windows of the text")->capture_default_str();
  command->add_flag("--every-head", a->every_head, "a row a head instead of means");
  command->add_option("--threads", a->threads, "default: the cores")->check(CLI::Range(0, 1024));
  command->add_flag("--lossy", a->lossy, "replace what isn't UTF-8 by U+FFFD");
  command->add_option("--json", a->json_file, "write the same as JSON");
  command->callback([a, &exit_code] { exit_code = run_heads(*a); });
}

}  // namespace isomer
