#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <numbers>

#include "comm/communicator.h"
#include "cost/op_cost.h"
#include "kernels/dispatch.h"
#include "kernels/matmul.h"
#include "train/expert_loads.h"

namespace isomer {

namespace {

/// FLOP/s of a large product on this rank's threads: what a step is measured against. By processor time, so that
/// programs beside it at the start don't make every later step look good.
double matrix_rate(RankContext& ctx, DType dtype) {
  constexpr std::int64_t kSize = 1024;
  const Tensor a = ctx.zeros("rate a", MemoryClass::workspace, dtype, {kSize, kSize});
  const Tensor b = ctx.zeros("rate b", MemoryClass::workspace, dtype, {kSize, kSize});
  const Tensor c = ctx.zeros("rate c", MemoryClass::workspace, dtype, {kSize, kSize});
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 5; ++i) {
    const double begin = thread_cpu_s();
    matmul(ctx, "matrix rate", a, b, c);
    const double mine = thread_cpu_s() - begin;
    best = std::min(best, ctx.threads().num_threads() > 1 ? std::max(mine, ctx.threads().last_worker_cpu_s()) : mine);
  }
  return matmul_cost(1, kSize, kSize, kSize, dtype, dtype).flops / best;
}

/// What must not be the same twice: this rank's share of a run.
class TrainRank {
 public:
  TrainRank(RankContext& ctx, const TrainRun& run, const RunDirectory& directory)
      : ctx_(ctx),
        run_(run),
        settings_(run.settings),
        directory_(directory),
        dtype_(dtype_of(settings_)),
        layout_(parse_layout(settings_.layout)),
        parameters_(ctx, run.config, dtype_),
        model_(ctx, {.config = run.config,
                     .layout = layout_,
                     .dtype = dtype_,
                     .core = attention_core_of(settings_),
                     .seq = settings_.seq,
                     .batch = micro_batch_of(run)}),
        loads_(run.config) {
    observe_routing();
  }

  TrainAccount dry_step() {
    const Sample empty{.ids = std::vector<std::int32_t>(static_cast<std::size_t>(settings_.seq)),
                       .targets = std::vector<std::int32_t>(static_cast<std::size_t>(settings_.seq)),
                       .segments = std::vector<std::int32_t>(static_cast<std::size_t>(settings_.seq)),
                       .positions = {}};
    begin_step();
    const std::vector<Sample> samples(static_cast<std::size_t>(model_.options().batch), empty);
    for (std::int64_t m = 0; m < num_micro_batches(); ++m) {
      begin_micro_batch(m);
      model_.forward_backward(ctx_, parameters_, samples, 1.0);
    }
    finish_gradients();
    adamw_step(ctx_, parameters_, settings_.adamw, 0, 0, 1);
    parameters_.refresh(ctx_);
    return account();
  }

  TrainResult train() {
    start();
    const std::int64_t end = run_.stop_at > 0 ? std::min(run_.stop_at, settings_.steps) : settings_.steps;
    TrainResult result{.steps = state_.step};
    std::int64_t saved_at = state_.step > 0 ? state_.step : -1;
    while (state_.step < end && !result.stopped_early) {
      StepMetrics metrics = step();
      result.last_loss = metrics.loss;
      result.stopped_early = stop_requested();
      const bool last = state_.step == end || result.stopped_early;
      const bool evaluates =
          run_.eval_data && (last || (settings_.eval_every > 0 && state_.step % settings_.eval_every == 0));
      if (evaluates) evaluate(metrics);
      report(metrics);
      if (last || (run_.save_every > 0 && state_.step % run_.save_every == 0)) {
        save();
        saved_at = state_.step;
      }
    }
    if (saved_at != state_.step) save();
    if (run_.on_end && at_root()) run_.on_end(parameters_);
    result.steps = state_.step;
    result.accounts.push_back(account_);
    return result;
  }

 private:
  bool at_root() const { return ctx_.rank() == 0; }
  std::int64_t num_micro_batches() const {
    return settings_.batch / model_.groups().data_size / model_.options().batch;
  }
  void say(const std::string& text) const {
    if (at_root() && run_.on_message) run_.on_message(text);
  }

  void start() {
    if (run_.resume) {
      const RunDirectory::Loaded loaded = directory_.load(ctx_, parameters_);
      state_ = loaded.state;
      ctx_.comm().barrier();  // nobody reads any more what is set aside
      if (at_root()) set_aside(loaded.damaged);
      if (state_.layout != settings_.layout) {
        say(fmt::format("resumed at step {}: written under {} on {} ranks, going on under {} on {}", state_.step,
                        state_.layout, state_.num_ranks, settings_.layout, ctx_.world_size()));
      } else {
        say(fmt::format("resumed at step {}", state_.step));
      }
      if (at_root()) directory_.repair(run_.keep);
    } else {
      ModelWeights weights = run_.initial_weights ? *run_.initial_weights
                                                  : initial_model_weights(run_.config, settings_.seed, DType::f32,
                                                                          settings_.initial_stddev);
      if (run_.on_begin) run_.on_begin(weights);
      parameters_.set(weights);
      parameters_.refresh(ctx_);
    }
    if (at_root() && run_.save_weights) {
      // Also of a run that was killed before its first checkpoint and begins anew.
      directory_.truncate_metrics(state_.step);
      metrics_.open(directory_.metrics_file(), std::ios::app);
    }
    if (run_.measure_matrix_rate && !clock_is_virtual(run_.group)) matrix_rate_ = matrix_rate(ctx_, dtype_);
    ctx_.comm().barrier();
  }

  void set_aside(const std::vector<DamagedCheckpoint>& damaged) const {
    for (const DamagedCheckpoint& checkpoint : damaged) {
      const auto aside = directory_.set_aside(checkpoint.path);
      say(fmt::format("passed over a damaged checkpoint, now {}: {}", aside.string(), checkpoint.reason));
    }
  }

  void begin_step() {
    ctx_.ledger().clear();
    ctx_.ops().clear();
    ctx_.memory().open_window();
    loads_.clear();
    run_kernel(ctx_, "zero gradients", elementwise_cost(parameters_.gradient.numel(), 0, 0, 1, DType::f32), [&] {
      std::memset(parameters_.gradient.raw(), 0, static_cast<std::size_t>(parameters_.gradient.nbytes()));
    });
  }

  /// Samples of one forward of this replica: consecutive ones of the global batch.
  std::vector<Sample> samples_of(std::int64_t first) const {
    std::vector<Sample> samples;
    for (std::int64_t i = 0; i < model_.options().batch; ++i) samples.push_back(run_.data->sample(first + i));
    return samples;
  }

  /// Targets of the whole batch: the same number on every rank, whatever part of it the rank has.
  std::int64_t count_targets() const {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < settings_.batch; ++i) {
      const Sample sample = run_.data->sample(state_.samples + i);
      count += std::count_if(sample.targets.begin(), sample.targets.end(), [](std::int32_t t) { return t >= 0; });
    }
    return count;
  }

  StepMetrics step() {
    const double begin = wall_clock_s();
    begin_step();
    const std::int64_t targets = std::max<std::int64_t>(1, count_targets());
    double loss = 0;
    for (std::int64_t m = 0; m < num_micro_batches(); ++m) {
      begin_micro_batch(m);
      const std::vector<Sample> samples = samples_of(state_.samples + first_sequence(m));
      loss += model_.forward_backward(ctx_, parameters_, samples, 1.0 / static_cast<double>(targets)).loss_sum;
    }
    finish_gradients();
    StepMetrics metrics{.total_steps = settings_.steps};
    metrics.loss = sum_over_ranks(loss) / static_cast<double>(targets);
    metrics.gradient_norm = gradient_norm(ctx_, parameters_);
    if (!std::isfinite(metrics.loss) || !std::isfinite(metrics.gradient_norm)) {
      throw Error(
          fmt::format("step {}: loss {}, gradient norm {}: training has diverged; the last checkpoint stands. A "
                      "smaller --learning-rate or a longer --warmup may help",
                      state_.step + 1, metrics.loss, metrics.gradient_norm));
    }
    metrics.learning_rate = learning_rate(settings_.adamw, state_.step, settings_.steps);
    adamw_step(ctx_, parameters_, settings_.adamw, state_.step, metrics.learning_rate, metrics.gradient_norm);
    loads_.update_correction_biases(parameters_.weights, settings_.bias_update_rate);
    parameters_.refresh(ctx_);
    account_ = account();
    state_.step += 1;
    state_.samples += settings_.batch;
    state_.tokens += targets;
    metrics.step = state_.step;
    metrics.tokens = state_.tokens;
    metrics.largest_load = loads_.largest();
    metrics.seconds = wall_clock_s() - begin;
    state_.seconds += metrics.seconds;
    metrics.tokens_per_s = static_cast<double>(targets) / metrics.seconds;
    if (matrix_rate_ > 0) {
      const double flops = ctx_.ops().flops(Phase::forward) + ctx_.ops().flops(Phase::backward);
      metrics.matrix_rate_share = flops / (metrics.seconds * matrix_rate_);
    }
    return metrics;
  }

  void finish_gradients() {
    model_.sync_gradients(ctx_, parameters_);
    loads_.sum_over_ranks(ctx_);
  }

  double sum_over_ranks(double value) {
    const PhaseScope phase(ctx_, Phase::report);
    const Tensor sum = ctx_.empty("loss", MemoryClass::communication, DType::f64, {1});
    sum.data<double>()[0] = value;
    if (ctx_.world_size() > 1) ctx_.comm().all_reduce("loss", sum);
    return sum.data<double>()[0];
  }

  /// Replayed and observed are the steps, not what evaluates them.
  /// Sequence of the global batch that this replica's micro-batch begins with.
  std::int64_t first_sequence(std::int64_t micro_batch) const {
    const std::int64_t share = settings_.batch / model_.groups().data_size;
    return model_.groups().data_rank * share + micro_batch * model_.options().batch;
  }

  /// Numbers this rank's tokens within the global batch, for traces of routing.
  void begin_micro_batch(std::int64_t micro_batch) {
    if (!run_.dry_trace && !run_.recorded_routing) return;
    tokens_ = model_.row_tokens();
    for (std::int64_t& token : tokens_) token += first_sequence(micro_batch) * settings_.seq;
  }

  void observe_routing() {
    model_.set_routing_sink([this, first = std::int64_t{-1}](std::int64_t layer, const Routing& routing) mutable {
      if (evaluating_) return;
      loads_.count(layer, routing);
      if (first < 0) first = state_.step;
      if (run_.recorded_routing && state_.step == first) run_.recorded_routing->enter(layer, tokens_, routing);
      if (run_.routing_sink) run_.routing_sink(state_.step, layer, ctx_.rank(), routing);
    });
    if (ctx_.dry_run() && run_.dry_trace) {
      model_.set_routing([this](std::int64_t layer) {
        if (!run_.config.is_moe_layer(layer)) return RoutingSource{};
        Routing& mine = replayed_[layer];
        mine = run_.dry_trace->of(layer, tokens_);
        return RoutingSource{.kind = RoutingSource::Kind::replayed, .replay = &mine};
      });
    } else if (ctx_.dry_run()) {
      model_.set_routing([kind = run_.dry_routing](std::int64_t layer) {
        return RoutingSource{.kind = kind, .seed = static_cast<std::uint64_t>(layer)};
      });
    } else if (run_.routing) {
      model_.set_routing([this](std::int64_t layer) {
        return evaluating_ ? RoutingSource{} : run_.routing(state_.step, layer, ctx_.rank());
      });
    }
  }

  bool stop_requested() {
    const bool mine = run_.stop_requested != nullptr && run_.stop_requested->load();
    return ctx_.comm().max_over_ranks(mine ? 1 : 0) > 0;
  }

  /// Mean loss over the first eval_sequences of the held-out text; every replica takes its share of them.
  void evaluate(StepMetrics& metrics) {
    evaluating_ = true;
    const std::int64_t batch = model_.options().batch, replicas = model_.groups().data_size;
    const std::int64_t wanted = std::min(settings_.eval_sequences, run_.eval_data->num_sequences());
    double loss = 0, targets = 0;
    for (std::int64_t first = model_.groups().data_rank * batch; first < wanted; first += batch * replicas) {
      std::vector<Sample> samples;
      for (std::int64_t i = 0; i < batch; ++i) {
        Sample sample = run_.eval_data->sample(std::min(first + i, wanted - 1));
        if (first + i >= wanted) std::fill(sample.targets.begin(), sample.targets.end(), -1);
        targets += static_cast<double>(
            std::count_if(sample.targets.begin(), sample.targets.end(), [](std::int32_t t) { return t >= 0; }));
        samples.push_back(std::move(sample));
      }
      for (const double token : model_.token_losses(ctx_, parameters_.weights, samples)) loss += token;
    }
    evaluating_ = false;
    // Every rank of a sequence counted all of its targets.
    const double total = sum_over_ranks(targets) / model_.groups().sequence->size();
    metrics.eval_loss = sum_over_ranks(loss) / std::max(1.0, total);
    const TokenDataset& text = run_.eval_data->dataset();
    if (text.num_text_bytes() > 0) {
      const double tokens_per_byte =
          static_cast<double>(text.num_tokens()) / static_cast<double>(text.num_text_bytes());
      metrics.eval_bits_per_byte = *metrics.eval_loss / std::numbers::ln2 * tokens_per_byte;
    }
  }

  void report(const StepMetrics& metrics) {
    if (!at_root()) return;
    if (metrics_.is_open()) {
      metrics_ << to_json(metrics).dump() << "\n";
      metrics_.flush();
      if (!metrics_) throw Error(fmt::format("{}: can't be written", directory_.metrics_file().string()));
    }
    if (run_.on_step) run_.on_step(metrics);
  }

  void save() {
    if (!run_.save_weights) return;
    const PhaseScope phase(ctx_, Phase::report);
    state_.layout = settings_.layout;
    state_.num_ranks = ctx_.world_size();
    if (at_root()) directory_.save(parameters_, state_, run_.files, dtype_, run_.keep);
    ctx_.comm().barrier();
  }

  TrainAccount account() const {
    const auto& memory = ctx_.memory();
    return {.weight_bytes = memory.current_bytes(MemoryClass::weight),
            .gradient_bytes = memory.current_bytes(MemoryClass::gradient),
            .optimiser_bytes = memory.current_bytes(MemoryClass::optimiser),
            .peak_activation_bytes = memory.peak_activation_bytes(),
            .standing_at_peak = memory.standing_at_peak(),
            .bytes_forward = ctx_.ledger().bytes_sent(Phase::forward),
            .bytes_backward = ctx_.ledger().bytes_sent(Phase::backward),
            .bytes_gradient_sync = ctx_.ledger().bytes_sent(Phase::gradient_sync),
            .flops = ctx_.ops().flops(Phase::forward) + ctx_.ops().flops(Phase::backward)};
  }

  RankContext& ctx_;
  const TrainRun& run_;
  const TrainSettings& settings_;
  const RunDirectory& directory_;
  DType dtype_;
  Layout layout_;
  Parameters parameters_;
  LanguageModel model_;
  TrainerState state_;
  ExpertLoads loads_;                         // of this step
  TrainAccount account_;                      // of the last step
  std::vector<std::int64_t> tokens_;          // of this rank in the global batch, where routing is traced
  std::map<std::int64_t, Routing> replayed_;  // by layer
  bool evaluating_ = false;
  double matrix_rate_ = 0;
  std::ofstream metrics_;
};

}  // namespace

TrainResult train(const TrainRun& run, const RunDirectory& directory) {
  check_run(run);
  TrainResult result;
  std::vector<TrainAccount> accounts(static_cast<std::size_t>(run.group.num_ranks));
  std::mutex mutex;
  const bool one_process = run.group.backend == Backend::threads || run.group.dry_run;
  run_group(run.group, [&](RankContext& ctx) {
    TrainRank rank(ctx, run, directory);
    TrainResult mine;
    if (ctx.dry_run()) {
      mine.accounts.push_back(rank.dry_step());
    } else {
      mine = rank.train();
    }
    const std::lock_guard lock(mutex);
    if (one_process) accounts[static_cast<std::size_t>(ctx.rank())] = mine.accounts.front();
    if (ctx.rank() == 0 || !one_process) result = std::move(mine);
  });
  if (one_process) result.accounts = std::move(accounts);
  return result;
}

}  // namespace isomer
