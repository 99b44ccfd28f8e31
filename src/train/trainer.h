// The training loop: data in a fixed order, gradients of a global batch over any number of ranks, AdamW, checkpoints.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "comm/group.h"
#include "layers/attention_core.h"
#include "train/adamw.h"
#include "train/batches.h"
#include "train/language_model.h"
#include "train/routing_trace.h"
#include "train/run_directory.h"

namespace isomer {

/// What a run is: fixed when it begins, kept in run.json, the same after every --resume. Only the layout may change.
struct TrainSettings {
  std::string config_json;  // the model's config.json as it stands
  std::string model_name;
  std::vector<std::string> data;
  std::string eval_data;  // held out; empty: none
  std::string init_from;  // the checkpoint that its first weights came from; empty: drawn from the seed
  std::string layout = "laga:1";
  std::string dtype = "f32";
  std::string attention = "fused";
  std::int64_t steps = 1000;     // the total that the schedule is made for
  std::int64_t seq = 512;        // tokens a sequence
  std::int64_t batch = 16;       // sequences a step, over all replicas
  std::int64_t micro_batch = 0;  // sequences a forward of one replica; 0: all of its share
  std::int64_t eval_every = 0;   // steps; 0: at the end only
  std::int64_t eval_sequences = 64;
  std::uint64_t seed = 1;
  double initial_stddev = 0.02;
  double bias_update_rate = 1e-3;  // of the V3 router's correction biases, per step (arXiv 2412.19437, 2.1.2)
  AdamWOptions adamw;
};
nlohmann::json to_json(const TrainSettings& settings);
/// Throws isomer::Error naming `source` and the key.
TrainSettings train_settings_from(const nlohmann::json& json, const std::string& source);
/// Throw std::invalid_argument for another value.
DType dtype_of(const TrainSettings& settings);
AttentionCore attention_core_of(const TrainSettings& settings);
/// Throws std::invalid_argument naming option, value and limit.
void check_settings(const TrainSettings& settings, const ModelConfig& config);

/// One step, as metrics.jsonl has it.
struct StepMetrics {
  std::int64_t step = 0;  // from 1
  std::int64_t total_steps = 0;
  std::int64_t tokens = 0;  // targets so far
  double loss = 0;          // nats a token, mean over the global batch
  double learning_rate = 0, gradient_norm = 0;
  double seconds = 0;  // of this step
  double tokens_per_s = 0;
  double matrix_rate_share = 0;  // counted FLOPs / (seconds · what the same threads do in a large product); 0: unknown
  double largest_load = 0;       // of an expert, in means, over layers; 0 without experts
  std::optional<double> eval_loss, eval_bits_per_byte;
};
nlohmann::json to_json(const StepMetrics& metrics);

/// What a rank holds and sends in a step: of a dry run, and at the end of a real one.
struct TrainAccount {
  std::int64_t weight_bytes = 0, gradient_bytes = 0, optimiser_bytes = 0, peak_activation_bytes = 0;
  std::vector<StandingTensor> standing_at_peak;
  std::int64_t bytes_forward = 0, bytes_backward = 0, bytes_gradient_sync = 0;  // sent
  double flops = 0;
};

struct TrainRun {
  TrainSettings settings;
  ModelConfig config;
  RunDirectory::ModelFiles files;
  std::shared_ptr<const BatchOrder> data, eval_data;  // eval_data may be null; both unused in a dry run
  bool resume = false;
  std::int64_t stop_at = 0;  // steps; 0: the total
  std::int64_t save_every = 500;
  int keep = 2;              // checkpoints
  bool save_weights = true;  // tests and dry runs: nothing on disk
  GroupOptions group;
  RoutingSource::Kind dry_routing = RoutingSource::Kind::balanced;
  std::shared_ptr<const RoutingTrace> dry_trace;   // a dry run's routing, instead
  std::shared_ptr<RoutingTrace> recorded_routing;  // takes that of the first step; ranks of this process
  const std::atomic<bool>* stop_requested = nullptr;
  std::function<void(const StepMetrics&)> on_step;     // at rank 0
  std::function<void(const std::string&)> on_message;  // at rank 0
  bool measure_matrix_rate = true;                     // some tenths of a second
  /// Studies and tests: routing replayed of step (from 0), layer and rank; one forward a step.
  std::function<RoutingSource(std::int64_t step, std::int64_t layer, int rank)> routing;
  std::function<void(std::int64_t step, std::int64_t layer, int rank, const Routing&)> routing_sink;
  std::shared_ptr<const ModelWeights> initial_weights;  // of a new run, in any dtype; null: drawn from the seed
  std::function<void(ModelWeights&)> on_begin;          // studies: changes what a new run begins with, on every rank
  std::function<void(const Parameters& parameters)> on_end;  // studies: at rank 0, what it ends with
};

/// Throws std::invalid_argument where the layout doesn't fit the model or the batch doesn't divide, before anything
/// runs.
void check_run(const TrainRun& run);
/// Sequences a forward of one replica.
std::int64_t micro_batch_of(const TrainRun& run);

struct TrainResult {
  std::int64_t steps = 0;
  double last_loss = 0;
  bool stopped_early = false;          // by stop_requested
  std::vector<TrainAccount> accounts;  // by rank; under MPI this process's only; zeros if no step was made
};

/// Trains to settings.steps (or stop_at) and leaves a checkpoint there. In a dry run: one step on shapes.
TrainResult train(const TrainRun& run, const RunDirectory& directory);

}  // namespace isomer
