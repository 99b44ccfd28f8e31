// isomer train: a language model under any training scheme.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/isomer/commands.h"
#include "apps/isomer/output_file.h"
#include "apps/isomer/table.h"
#include "apps/isomer/train_setup.h"
#include "apps/isomer/units.h"
#include "study/machine.h"
#include "train/interrupt.h"

namespace isomer {

namespace {

/// What happens now, for people: one line that is renewed on a terminal, a line now and then elsewhere.
class TrainProgress {
 public:
  explicit TrainProgress(bool enabled) : enabled_(enabled), line_(enabled) {}
  void show(const StepMetrics& m, std::int64_t end) {
    if (!enabled_) return;
    mean_seconds_ = mean_seconds_ == 0 ? m.seconds : 0.95 * mean_seconds_ + 0.05 * m.seconds;
    const std::string text = fmt::format(
        "step {}/{}  loss {:.4f}{}  {:.0f} tokens/s{}  {} left", m.step, end, m.loss,
        m.eval_bits_per_byte ? fmt::format("  held out {:.4f} bits/byte", *m.eval_bits_per_byte)
                             : (m.eval_loss ? fmt::format("  held out {:.4f}", *m.eval_loss) : ""),
        m.tokens_per_s,
        m.matrix_rate_share > 0 ? fmt::format("  {:.0f} % of the matrix rate", 100 * m.matrix_rate_share) : "",
        format_seconds(mean_seconds_ * static_cast<double>(end - m.step)));
    line_.show(text);
    const bool milestone =
        m.step == 1 || m.step == end || m.eval_loss || m.step % std::max<std::int64_t>(1, end / 20) == 0;
    if (milestone) say(text);
  }
  void say(const std::string& text) {
    if (!enabled_) return;
    line_.show("");
    fmt::print("{}\n", text);
    std::fflush(stdout);
  }
  Progress& line() { return line_; }

 private:
  bool enabled_;
  Progress line_;
  double mean_seconds_ = 0;
};

nlohmann::json account_json(const TrainAccount& a, int rank) {
  auto standing = nlohmann::json::array();
  for (const StandingTensor& t : a.standing_at_peak) {
    standing.push_back({{"name", t.name}, {"class", name_of(t.memory_class)}, {"bytes", t.bytes}});
  }
  return {{"rank", rank},
          {"weight_bytes", a.weight_bytes},
          {"gradient_bytes", a.gradient_bytes},
          {"optimiser_bytes", a.optimiser_bytes},
          {"peak_activation_bytes", a.peak_activation_bytes},
          {"bytes_sent",
           {{"forward", a.bytes_forward}, {"backward", a.bytes_backward}, {"gradient_sync", a.bytes_gradient_sync}}},
          {"flops", a.flops},
          {"standing_at_peak", standing}};
}

void print_accounts(const std::vector<TrainAccount>& accounts) {
  Table table({"rank", "weights", "gradients", "optimiser", "peak activations", "sent forward", "backward", "gradients",
               "FLOPs"});
  const std::size_t shown = std::min<std::size_t>(accounts.size(), 16);
  for (std::size_t rank = 0; rank < shown; ++rank) {
    const TrainAccount& a = accounts[rank];
    const auto bytes = [](std::int64_t b) { return format_bytes(static_cast<double>(b)); };
    table.add({fmt::format("{}", rank), bytes(a.weight_bytes), bytes(a.gradient_bytes), bytes(a.optimiser_bytes),
               bytes(a.peak_activation_bytes), bytes(a.bytes_forward), bytes(a.bytes_backward),
               bytes(a.bytes_gradient_sync), fmt::format("{:.3g}", a.flops)});
  }
  fmt::print("{}", table.text());
  if (shown < accounts.size()) fmt::print("… and {} ranks more (--json has all)\n", accounts.size() - shown);
  const auto largest = std::max_element(accounts.begin(), accounts.end(), [](const auto& a, const auto& b) {
    return a.peak_activation_bytes < b.peak_activation_bytes;
  });
  fmt::print("\nlargest in the peak:");
  for (std::size_t i = 0; i < std::min<std::size_t>(6, largest->standing_at_peak.size()); ++i) {
    const StandingTensor& t = largest->standing_at_peak[i];
    fmt::print(" {} {};", t.name, format_bytes(static_cast<double>(t.bytes)));
  }
  fmt::print("\none step; bytes to other ranks. Weights, gradients and moments are whole on every rank.\n");
}

void write_json(const TrainArguments& a, const TrainRun& run, const TrainResult& result) {
  nlohmann::json json = machine_json(threads_per_rank(run.group), run.settings.seed);
  auto ranks = nlohmann::json::array();
  for (std::size_t rank = 0; rank < result.accounts.size(); ++rank) {
    ranks.push_back(account_json(result.accounts[rank], static_cast<int>(rank)));
  }
  json.update({{"command", "train"},
               {"model", run.config.name},
               {"layout", run.settings.layout},
               {"ranks", run.group.num_ranks},
               {"dry_run", run.group.dry_run},
               {"steps", result.steps},
               {"loss", run.group.dry_run ? nlohmann::json() : nlohmann::json(result.last_loss)},
               {"stopped_early", result.stopped_early},
               {"accounts", ranks}});
  write_text_atomically(a.json_file, json.dump(2) + "\n");
}

void check_resume(const CLI::App& command) {
  for (const char* option : {"--config",         "--data",         "--tokenizer",      "--out",
                             "--steps",          "--seq",          "--batch",          "--micro-batch",
                             "--dtype",          "--attention",    "--learning-rate",  "--min-learning-rate",
                             "--warmup",         "--weight-decay", "--beta1",          "--beta2",
                             "--clip",           "--seed",         "--init-std",       "--bias-update-rate",
                             "--eval-data",      "--eval-every",   "--eval-sequences", "--dry-run",
                             "--record-routing", "--lossy",        "--init-from"}) {
    if (command.count(option) > 0) {
      invalid_argument(
          "{} with --resume: a run keeps what it began with (run.json); only --layout, --ranks, --backend, "
          "--threads, --stop-at, --save-every, --keep, --link and --timeout may change",
          option);
    }
  }
}

/// What the command line leaves to its other options.
void complete_settings(TrainArguments& a, const CLI::App& command) {
  a.settings.seq = parse_count("--seq", a.seq, 1, 1 << 24);
  a.settings.seed = parse_seed(a.seed);
  if (command.count("--layout") > 0 && a.layout.empty()) {
    invalid_argument("--layout: it is empty; name a layout (laga:2, ring:4, laga:2,dp:2), or leave the option out");
  }
  if (!a.layout.empty()) a.settings.layout = a.layout;
  if (command.count("--init-from") > 0) {
    if (a.settings.init_from.empty()) invalid_argument("--init-from: it is empty; name a model with weights");
    if (command.count("--init-std") > 0)
      invalid_argument("--init-std with --init-from: no weights are drawn; leave it out");
    if (a.config.empty()) a.config = a.settings.init_from;
  }
  AdamWOptions& adamw = a.settings.adamw;
  if (command.count("--warmup") == 0) adamw.warmup_steps = std::min(adamw.warmup_steps, a.settings.steps / 10);
  if (command.count("--min-learning-rate") == 0) adamw.min_learning_rate = adamw.learning_rate / 10;
}

/// --stop-at lies ahead, within the schedule.
void check_stop_at(std::int64_t stop_at, std::int64_t at_step, std::int64_t steps) {
  if (stop_at == 0) return;
  if (stop_at > steps) {
    invalid_argument("--stop-at {}: the run's schedule has {} steps; name a step up to {}", stop_at, steps, steps);
  }
  if (stop_at <= at_step) {
    invalid_argument("--stop-at {}: the run is at step {} already; name a later one, up to {}", stop_at, at_step,
                     steps);
  }
}

int run_dry(const TrainArguments& a) {
  const TrainRun run = prepare_dry_run(a).run;
  const TrainResult result = train(run, RunDirectory("."));
  fmt::print("{}: one step of {} × {} tokens under {} on {} ranks (dry run)\n\n", run.config.name, run.settings.batch,
             run.settings.seq, run.settings.layout, run.group.num_ranks);
  print_accounts(result.accounts);
  if (!a.json_file.empty()) write_json(a, run, result);
  return 0;
}

int run_train(TrainArguments& a, const CommandLine& command_line, const CLI::App& command) {
  complete_settings(a, command);
  check_output_file("--json", a.json_file);
  check_output_file("--record-routing", a.record_routing);
  const bool resume = !a.resume.empty();
  if (resume) check_resume(command);
  if (a.dry_run) return run_dry(a);
  const RunDirectory directory(resume ? a.resume : a.out);
  PreparedRun prepared = resume ? prepare_resumed_run(a, directory) : prepare_new_run(a, directory);
  TrainRun& run = prepared.run;
  check_stop_at(a.stop_at, resume ? directory.latest_step() : 0, run.settings.steps);
  const bool mpi = run.group.backend == Backend::mpi;
  if (mpi && !under_mpirun()) relaunch_under_mpirun(run.group, command_line.argc, command_line.argv);
  const bool at_root = !mpi || mpi_world().rank == 0;
  TrainProgress progress(at_root);
  std::optional<RunLock> lock;
  if (resume && at_root) lock.emplace(directory.lock());
  load_data(prepared, directory, progress.line());
  if (!resume && at_root) lock.emplace(directory.lock());
  const StopOnSignal signals;
  run.stop_at = a.stop_at;
  run.save_every = a.save_every;
  run.keep = a.keep;
  run.stop_requested = &signals.requested();
  const std::int64_t end = a.stop_at > 0 ? std::min(a.stop_at, run.settings.steps) : run.settings.steps;
  run.on_step = [&](const StepMetrics& m) { progress.show(m, end); };
  run.on_message = [&](const std::string& text) { progress.say(text); };
  progress.say(fmt::format("{}: {} sequences of {} tokens in {} tokens of text, {} steps of {} sequences, {}, {}",
                           run.config.name, run.data->num_sequences(), run.settings.seq,
                           run.data->dataset().num_tokens(), run.settings.steps, run.settings.batch,
                           run.settings.layout, run.settings.dtype));
  const TrainResult result = train(run, directory);
  if (!at_root) return 0;
  if (run.recorded_routing) run.recorded_routing->save(a.record_routing);
  if (!a.json_file.empty()) write_json(a, run, result);
  if (result.stopped_early) {
    progress.say(fmt::format("stopped at step {} with a checkpoint; go on with: isomer train --resume {}", result.steps,
                             directory.path().string()));
  } else {
    progress.say(fmt::format("step {}: the model is in {}", result.steps, directory.path().string()));
  }
  return 0;
}

void add_model_options(CLI::App& command, TrainArguments& a) {
  TrainSettings& s = a.settings;
  command.add_option("--config", a.config, "the model: a directory with config.json, a JSON file or a built-in name");
  command.add_option("--data", s.data, "text files, or one token file");
  command.add_flag("--lossy", a.lossy, "replace what isn't UTF-8 in the text by U+FFFD");
  command.add_option("--tokenizer", a.tokenizer, "tokenizer.json or its directory; default: beside the config");
  command.add_option("--out", a.out, "a new directory for the run");
  command.add_option("--resume", a.resume, "go on with the run in this directory");
  command.add_option("--steps", s.steps, "the total that the schedule is made for")->capture_default_str();
  command.add_option("--seq", a.seq, "tokens a sequence")->capture_default_str();
  command.add_option("--batch", s.batch, "sequences a step, over all replicas")->capture_default_str();
  command.add_option("--micro-batch", s.micro_batch, "sequences a forward; 0: all of a replica's")
      ->capture_default_str();
  command.add_option("--dtype", s.dtype, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  command.add_option("--attention", s.attention, "fused or eager")
      ->check(CLI::IsMember({"fused", "eager"}))
      ->capture_default_str();
  command.add_option("--seed", a.seed, "of weights and order")->capture_default_str();
  command.add_option("--init-std", s.initial_stddev, "of the first weights")->capture_default_str();
  command.add_option(
      "--init-from", s.init_from,
      "begin with the weights of this model (a directory with config.json or a GGUF file), which --config "
      "then defaults to");
}

void add_optimiser_options(CLI::App& command, TrainArguments& a) {
  TrainSettings& s = a.settings;
  command.add_option("--learning-rate", s.adamw.learning_rate, "after the warm-up")->capture_default_str();
  command.add_option("--min-learning-rate", s.adamw.min_learning_rate, "where the cosine ends; default: a tenth of it");
  command.add_option("--warmup", s.adamw.warmup_steps, "steps; default: a tenth of all, at most 100");
  command.add_option("--weight-decay", s.adamw.weight_decay, "of matrices")->capture_default_str();
  command.add_option("--beta1", s.adamw.beta1, "AdamW")->capture_default_str();
  command.add_option("--beta2", s.adamw.beta2, "AdamW")->capture_default_str();
  command.add_option("--clip", s.adamw.clip_norm, "largest global gradient norm; 0: none")->capture_default_str();
  command.add_option("--bias-update-rate", s.bias_update_rate, "of the V3 router's correction biases a step")
      ->capture_default_str();
  command.add_option("--eval-data", s.eval_data, "held-out text");
  command.add_option("--eval-every", s.eval_every, "steps; 0: at the end only")->capture_default_str();
  command.add_option("--eval-sequences", s.eval_sequences, "of the held-out text at most")->capture_default_str();
}

void add_run_options(CLI::App& command, TrainArguments& a) {
  command.add_option("--layout", a.layout,
                     "laga:2, ring:4, laga:2,dp:2, …; default laga:1, explicit:1 for grouped-query attention");
  command.add_option("--ranks", a.ranks, "default: what the layout says")->check(CLI::Range(1, 4096));
  command.add_option("--threads", a.threads, "a rank; default: a share of the cores")->check(CLI::Range(0, 1024));
  command.add_option("--backend", a.backend, "threads, or processes under Open MPI")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  command.add_option("--link", a.link, "emulated link, LATENCY,BANDWIDTH a rank (5us,2GB/s)");
  command.add_option("--stop-at", a.stop_at, "end at this step, with a checkpoint and the same schedule")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  command.add_option("--save-every", a.save_every, "steps between checkpoints; 0: at the end only")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  command.add_option("--keep", a.keep, "checkpoints kept")->check(CLI::Range(1, 1000))->capture_default_str();
  command.add_option("--timeout", a.timeout_s, "seconds without a sign of life after which a rank has stalled")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  command.add_flag("--dry-run", a.dry_run, "shapes only: memory, bytes and FLOPs of one step");
  command.add_option("--routing", a.routing, "of a dry run's experts: balanced, zipf, or a trace")
      ->capture_default_str();
  command.add_option("--record-routing", a.record_routing, "write the routing of the first step as a trace (JSON)");
  command.add_option("--json", a.json_file, "write the accounts as JSON");
}

}  // namespace

void add_train(CLI::App& app, const CommandLine& command_line, int& exit_code) {
  auto a = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand("train", "train a language model under any sequence-parallel scheme");
  add_model_options(*command, *a);
  add_optimiser_options(*command, *a);
  add_run_options(*command, *a);
  command->callback([a, command, command_line, &exit_code] { exit_code = run_train(*a, command_line, *command); });
}

}  // namespace isomer
