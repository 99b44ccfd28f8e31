#include <algorithm>

#include "core/error.h"
#include "parallel/sequence/scheme.h"
#include "sharding/sequence_layout.h"
#include "train/trainer.h"

namespace isomer {

namespace {

/// fn(key, field) for every setting, so that writing and reading can't drift apart.
template <class Settings, class Fn>
void for_each_setting(Settings& s, Fn&& fn) {
  fn("config", s.config_json);
  fn("model", s.model_name);
  fn("data", s.data);
  fn("eval_data", s.eval_data);
  fn("init_from", s.init_from);
  fn("layout", s.layout);
  fn("dtype", s.dtype);
  fn("attention", s.attention);
  fn("steps", s.steps);
  fn("seq", s.seq);
  fn("batch", s.batch);
  fn("micro_batch", s.micro_batch);
  fn("eval_every", s.eval_every);
  fn("eval_sequences", s.eval_sequences);
  fn("seed", s.seed);
  fn("initial_stddev", s.initial_stddev);
  fn("bias_update_rate", s.bias_update_rate);
  fn("learning_rate", s.adamw.learning_rate);
  fn("min_learning_rate", s.adamw.min_learning_rate);
  fn("warmup_steps", s.adamw.warmup_steps);
  fn("beta1", s.adamw.beta1);
  fn("beta2", s.adamw.beta2);
  fn("adam_epsilon", s.adamw.epsilon);
  fn("weight_decay", s.adamw.weight_decay);
  fn("clip_norm", s.adamw.clip_norm);
}

void check_range(std::string_view option, double value, double low, double high) {
  if (!(value >= low && value <= high)) {
    invalid_argument("--{} {}: it takes {} to {}", option, value, low, high);
  }
}

}  // namespace

nlohmann::json to_json(const TrainSettings& settings) {
  nlohmann::json json = {{"schema_version", 1}, {"version", ISOMER_VERSION}};
  for_each_setting(settings, [&](const char* key, const auto& field) { json[key] = field; });
  return json;
}

TrainSettings train_settings_from(const nlohmann::json& json, const std::string& source) {
  TrainSettings settings;
  for_each_setting(settings, [&](const char* key, auto& field) {
    const auto found = json.find(key);
    if (found == json.end()) {
      if (std::string_view(key) == "init_from") return;  // runs begun before there was one
      throw Error(fmt::format("{}: key '{}' is missing", source, key));
    }
    try {
      found->get_to(field);
    } catch (const nlohmann::json::exception& error) {
      throw Error(fmt::format("{}: key '{}': {}", source, key, error.what()));
    }
  });
  return settings;
}

DType dtype_of(const TrainSettings& settings) {
  if (settings.dtype == "f32") return DType::f32;
  if (settings.dtype == "bf16") return DType::bf16;
  invalid_argument("--dtype '{}': it takes f32 or bf16", settings.dtype);
}

AttentionCore attention_core_of(const TrainSettings& settings) {
  if (settings.attention == "fused") return AttentionCore::fused;
  if (settings.attention == "eager") return AttentionCore::eager;
  invalid_argument("--attention '{}': it takes fused or eager", settings.attention);
}

std::int64_t micro_batch_of(const TrainRun& run) {
  const int replicas = sequence_layout(parse_layout(run.settings.layout), run.group.num_ranks).data_replicas;
  const std::int64_t share = run.settings.batch / replicas;
  return run.settings.micro_batch > 0 ? std::min(run.settings.micro_batch, share) : share;
}

void check_run(const TrainRun& run) {
  const TrainSettings& s = run.settings;
  check_settings(s, run.config);
  dtype_of(s);
  const Layout layout = parse_layout(s.layout);
  const int ranks = run.group.num_ranks;
  make_sequence_scheme(layout, run.config);
  const std::string reason = why_unfit(layout, run.config, ranks, s.seq, attention_core_of(s));
  if (!reason.empty()) invalid_argument("--layout {}: {}", s.layout, reason);
  const int replicas = sequence_layout(layout, ranks).data_replicas;
  if (s.batch % replicas != 0) {
    const std::int64_t near = std::max<std::int64_t>(1, s.batch / replicas) * replicas;
    invalid_argument("--batch {}: {} data-parallel replicas don't divide it; take {} or {}", s.batch, replicas, near,
                     near + replicas);
  }
  const std::int64_t share = s.batch / replicas, micro = micro_batch_of(run);
  if (share % micro != 0) {
    invalid_argument("--micro-batch {}: it doesn't divide the {} sequences of a replica's step", micro, share);
  }
}

void check_settings(const TrainSettings& s, const ModelConfig& config) {
  check_range("steps", static_cast<double>(s.steps), 1, 1e9);
  check_range("seq", static_cast<double>(s.seq), 1, 1 << 24);
  check_range("batch", static_cast<double>(s.batch), 1, 1 << 20);
  check_range("micro-batch", static_cast<double>(s.micro_batch), 0, static_cast<double>(s.batch));
  check_range("warmup", static_cast<double>(s.adamw.warmup_steps), 0, static_cast<double>(s.steps));
  check_range("learning-rate", s.adamw.learning_rate, 0, 10);
  check_range("min-learning-rate", s.adamw.min_learning_rate, 0, s.adamw.learning_rate);
  check_range("beta1", s.adamw.beta1, 0, 0.999999);
  check_range("beta2", s.adamw.beta2, 0, 0.999999);
  check_range("weight-decay", s.adamw.weight_decay, 0, 10);
  check_range("clip", s.adamw.clip_norm, 0, 1e9);
  check_range("init-std", s.initial_stddev, 0, 1e3);
  check_range("bias-update-rate", s.bias_update_rate, 0, 1);
  check_range("eval-every", static_cast<double>(s.eval_every), 0, 1e9);
  check_range("eval-sequences", static_cast<double>(s.eval_sequences), 1, 1e9);
  if (config.max_position_embeddings > 0 && s.seq > config.max_position_embeddings) {
    invalid_argument("--seq {}: '{}' is made for positions up to {} (max_position_embeddings)", s.seq, config.name,
                     config.max_position_embeddings);
  }
}

nlohmann::json to_json(const StepMetrics& m) {
  nlohmann::json json = {{"step", m.step},
                         {"tokens", m.tokens},
                         {"loss", m.loss},
                         {"learning_rate", m.learning_rate},
                         {"gradient_norm", m.gradient_norm},
                         {"seconds", m.seconds},
                         {"tokens_per_s", m.tokens_per_s}};
  if (m.matrix_rate_share > 0) json["matrix_rate_share"] = m.matrix_rate_share;
  if (m.largest_load > 0) json["largest_expert_load"] = m.largest_load;
  if (m.eval_loss) json["eval_loss"] = *m.eval_loss;
  if (m.eval_bits_per_byte) json["eval_bits_per_byte"] = *m.eval_bits_per_byte;
  return json;
}

}  // namespace isomer
