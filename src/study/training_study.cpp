#include "study/training_study.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "core/error.h"
#include "model/json_text.h"
#include "model/text.h"
#include "model/tokenizer_trainer.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

constexpr const char* kConfig = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": false,
  "hidden_act": "silu", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 32,
  "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32,
  "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
  "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc",
  "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
  "rms_norm_eps": 1e-06, "max_position_embeddings": 512, "rope_theta": 10000, "rope_scaling": null,
  "tie_word_embeddings": false, "torch_dtype": "float32"
})";

/// A rank's rows among the whole batch's.
class RowMap {
 public:
  RowMap(const std::string& layout, const TrainSettings& settings, int ranks) {
    const TokenShards tokens = token_shards_of(sized_layout(parse_layout(layout), ranks), settings.seq, settings.batch);
    for (int rank = 0; rank < ranks; ++rank) {
      auto& rows = rows_.emplace_back();
      for (const IndexRange& range : tokens.positions(rank)) {
        for (std::int64_t row = range.begin * settings.batch; row < range.end() * settings.batch; ++row) {
          rows.push_back(row);
        }
      }
    }
    total_ = tokens.total_rows();
  }
  const std::vector<std::int64_t>& of(int rank) const { return rows_.at(static_cast<std::size_t>(rank)); }
  std::int64_t total() const { return total_; }

 private:
  std::vector<std::vector<std::int64_t>> rows_;
  std::int64_t total_ = 0;
};

/// Collects the ranks' routing into a trace; called on their threads.
void collect(RoutingHistory& trace, const RowMap& rows, std::int64_t step, std::int64_t layer, int rank,
             const Routing& routing) {
  auto& experts = trace.at(step, layer);
  experts.resize(static_cast<std::size_t>(rows.total() * routing.top_k));
  const auto& mine = rows.of(rank);
  ISOMER_CHECK(routing.num_tokens == static_cast<std::int64_t>(mine.size()), "rank {} routes {} tokens, it has {}",
               rank, routing.num_tokens, mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    std::copy_n(routing.experts.begin() + static_cast<std::ptrdiff_t>(i) * routing.top_k, routing.top_k,
                experts.begin() + mine[i] * routing.top_k);
  }
}

/// What a rank replays of a trace: one layer's routing stands until the same layer of the next step is asked for.
class Replay {
 public:
  Replay(const RoutingHistory& trace, const RowMap& rows, std::int64_t top_k, int ranks, std::int64_t layers)
      : trace_(trace), rows_(rows), top_k_(top_k), layers_(layers), held_(static_cast<std::size_t>(ranks * layers)) {}

  RoutingSource source(std::int64_t step, std::int64_t layer, int rank) {
    const auto& experts = trace_.at(step, layer);
    if (experts.empty()) return {};
    Routing& routing = held_[static_cast<std::size_t>(rank * layers_ + layer)];
    const auto& mine = rows_.of(rank);
    routing.num_tokens = static_cast<std::int64_t>(mine.size());
    routing.top_k = top_k_;
    routing.experts.resize(mine.size() * static_cast<std::size_t>(top_k_));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      std::copy_n(experts.begin() + mine[i] * top_k_, top_k_,
                  routing.experts.begin() + static_cast<std::ptrdiff_t>(i) * top_k_);
    }
    return {.kind = RoutingSource::Kind::replayed, .replay = &routing};
  }

 private:
  const RoutingHistory& trace_;
  const RowMap& rows_;
  std::int64_t top_k_, layers_;
  std::vector<Routing> held_;  // [ranks, layers]: no two ranks touch the same
};

/// One value of the first layer's latent projection, to the next float upwards.
void move_one_weight(ModelWeights& weights) {
  float& value = weights.layers.front().attention.kv_a_proj.data<float>()[0];
  value = std::nextafter(value, std::numeric_limits<float>::infinity());
}

}  // namespace

RoutingHistory::RoutingHistory(std::int64_t num_steps, std::int64_t num_layers)
    : num_steps_(num_steps), num_layers_(num_layers), experts_(static_cast<std::size_t>(num_steps * num_layers)) {}

std::vector<std::int32_t>& RoutingHistory::at(std::int64_t step, std::int64_t layer) {
  return experts_.at(static_cast<std::size_t>(step * num_layers_ + layer));
}
const std::vector<std::int32_t>& RoutingHistory::at(std::int64_t step, std::int64_t layer) const {
  return experts_.at(static_cast<std::size_t>(step * num_layers_ + layer));
}

std::int64_t count_flips(const RoutingHistory& a, const RoutingHistory& b, std::int64_t step, std::int64_t layer,
                         std::int64_t top_k) {
  const auto &x = a.at(step, layer), &y = b.at(step, layer);
  ISOMER_CHECK(x.size() == y.size(), "step {}, layer {}: {} choices beside {}", step, layer, x.size(), y.size());
  std::int64_t flips = 0;
  for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(top_k)) {
    std::vector<std::int32_t> p(&x[i], &x[i] + top_k), q(&y[i], &y[i] + top_k);
    std::sort(p.begin(), p.end());
    std::sort(q.begin(), q.end());
    flips += p == q ? 0 : 1;
  }
  return flips;
}

TrainingStudy::TrainingStudy(bool quick, std::uint64_t seed) {
  config_ = parse_model_config(parse_json(kConfig, "the study's configuration"), "study");
  settings_.config_json = kConfig;
  settings_.model_name = "study";
  settings_.steps = quick ? 6 : 200;
  settings_.seq = quick ? 16 : 128;
  settings_.batch = quick ? 2 : 4;
  settings_.seed = seed;
  settings_.adamw.warmup_steps = quick ? 2 : 20;
  check_settings(settings_, config_);
  // A part of the novel is enough for what so few steps read.
  const std::string_view text = default_text().substr(0, quick ? 20000 : 400000);
  TokenizerTrainer trainer({.vocab_size = quick ? 300 : 512});
  trainer.add_text(text);
  const Tokenizer tokenizer = trainer.train();
  tokens_ = std::make_shared<const TokenDataset>(TokenDataset::from_tokens(
      {tokenizer.encode(text)}, tokenizer.vocab_size(), tokenizer.hash(), static_cast<std::int64_t>(text.size())));
}

std::vector<std::int64_t> TrainingStudy::routed_layers() const {
  std::vector<std::int64_t> layers;
  for (std::int64_t l = config_.moe.first_k_dense_replace; l < config_.num_hidden_layers; ++l) layers.push_back(l);
  return layers;
}

StudyResult TrainingStudy::run(const StudyRun& study) const {
  TrainRun run;
  run.settings = settings_;
  run.settings.layout = fmt::format("{}:{}", study.layout, study.ranks);
  run.settings.seed = study.seed;
  run.config = config_;
  run.data = std::make_shared<const BatchOrder>(
      *tokens_, BatchOptions{.seq_len = settings_.seq, .seed = settings_.seed, .shuffle = true});
  run.save_weights = false;
  run.group.num_ranks = study.ranks;
  run.group.threads_per_rank = 1;
  const std::int64_t layers = config_.num_hidden_layers, top_k = config_.moe.num_experts_per_tok;
  StudyResult result{.routing = RoutingHistory(settings_.steps, layers)};
  const RowMap rows(study.layout, settings_, study.ranks);
  std::mutex mutex;
  run.routing_sink = [&](std::int64_t step, std::int64_t layer, int rank, const Routing& routing) {
    const std::lock_guard lock(mutex);
    collect(result.routing, rows, step, layer, rank, routing);
  };
  std::optional<Replay> replay;
  if (study.replay != nullptr) {
    replay.emplace(*study.replay, rows, top_k, study.ranks, layers);
    run.routing = [&](std::int64_t step, std::int64_t layer, int rank) { return replay->source(step, layer, rank); };
  }
  if (study.moves_one_weight) run.on_begin = move_one_weight;
  run.on_step = [&](const StepMetrics& m) {
    result.losses.push_back(m.loss);
    result.seconds += m.seconds;
  };
  run.on_end = [&](const Parameters& parameters) {
    const float* begin = parameters.master.data<float>();
    result.weights.assign(begin, begin + parameters.master.numel());
  };
  train(run, RunDirectory("."));
  return result;
}

double end_loss(const std::vector<double>& losses) {
  const std::size_t count = std::max<std::size_t>(1, losses.size() / 10);
  return std::accumulate(losses.end() - static_cast<std::ptrdiff_t>(count), losses.end(), 0.0) /
         static_cast<double>(count);
}

Parting parting_of(const StudyResult& a, const StudyResult& b) {
  ISOMER_CHECK(a.losses.size() == b.losses.size() && a.weights.size() == b.weights.size(),
               "{} steps and {} weights beside {} and {}", a.losses.size(), a.weights.size(), b.losses.size(),
               b.weights.size());
  Parting parting;
  for (std::size_t step = 0; step < a.losses.size(); ++step) {
    const double difference = std::abs(a.losses[step] - b.losses[step]);
    if (difference != 0 && parting.first_step == 0) parting.first_step = static_cast<std::int64_t>(step) + 1;
    parting.largest = std::max(parting.largest, difference);
  }
  parting.at_end = std::abs(end_loss(a.losses) - end_loss(b.losses));
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    parting.weights_largest =
        std::max(parting.weights_largest, static_cast<double>(std::abs(a.weights[i] - b.weights[i])));
  }
  parting.identical =
      parting.first_step == 0 && std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * sizeof(float)) == 0;
  return parting;
}

}  // namespace isomer
