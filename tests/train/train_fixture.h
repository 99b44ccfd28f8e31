// Small models, texts and runs for the tests of training: odd sizes, packed documents, every optional part.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <nlohmann/json.hpp>

#include "sharding/sequence_layout.h"
#include "tensor_values.h"
#include "train/trainer.h"

namespace isomer::testing {

constexpr std::int64_t kVocab = 37;

/// Latent attention with compressed queries; a dense layer, then experts with V3's router and a shared expert. 24 heads
/// are spread over 2, 3, 4 and 8 ranks.
inline const std::string kLatentModel = R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
  "attention_bias": false, "hidden_act": "silu", "vocab_size": 37, "hidden_size": 28, "intermediate_size": 22,
  "moe_intermediate_size": 10, "num_hidden_layers": 3, "num_attention_heads": 24, "num_key_value_heads": 24,
  "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
  "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
  "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 4, "topk_group": 2,
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
  "rope_theta": 10000, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16"})";

/// Grouped queries, dense, the head tied to the embedding.
inline const std::string kGroupedModel = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "attention_bias": false, "hidden_act": "silu", "vocab_size": 37, "hidden_size": 28, "intermediate_size": 22,
  "num_hidden_layers": 2, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 6, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 64, "rope_theta": 10000, "rope_scaling": null, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16"})";

inline ModelConfig config_from(const std::string& json) {
  return parse_model_config(nlohmann::json::parse(json), "small");
}

/// Weights whose logits spread, with norms and correction biases that are not what training begins with.
inline ModelWeights spread_weights(const ModelConfig& config) {
  ModelWeights weights = initial_model_weights(config, 5, DType::f32, 0.25);
  std::uint64_t seed = 100;
  weights.for_each([&](const std::string& name, const Tensor& tensor) {
    ++seed;
    if (tensor.dim() != 1) return;
    const bool norm = name.find("norm") != std::string::npos;
    set_values(tensor, noise_values(seed, tensor.numel(), norm ? 0.2 : 0.05, norm ? 1 : 0));
  });
  return weights;
}

/// Documents of learnable text (a token says much about the next), long stretches of short ones among them, so that
/// neither sequences nor ranks have equally many targets.
inline TokenDataset documents(std::int64_t count = 60) {
  std::vector<std::vector<std::int32_t>> texts;
  std::uint64_t at = 0;
  for (std::int64_t d = 0; d < count; ++d) {
    const std::int64_t length = d % 12 < 6 ? 1 + d % 3 : 19 + d % 7;
    auto& text = texts.emplace_back();
    for (std::int64_t i = 0; i < length; ++i) {
      const double chance = noise(9, ++at);
      const std::int64_t next = i == 0 ? d * 7 : text.back() * 3 + 1;
      text.push_back(static_cast<std::int32_t>((next + (chance > 1 ? 5 : 0)) % kVocab));
    }
  }
  return TokenDataset::from_tokens(texts, kVocab);
}

inline GroupOptions group_of(int ranks) {
  GroupOptions group;
  group.num_ranks = ranks;
  group.threads_per_rank = 1;
  group.timeout_s = 120;
  return group;
}

/// Nothing on disk, some steps of 4 sequences of 23 tokens.
inline TrainRun small_run(const std::string& model_json, const std::string& layout, std::int64_t steps) {
  TrainRun run;
  run.settings.config_json = model_json;
  run.settings.model_name = "small";
  run.settings.steps = steps;
  run.settings.seq = 23;
  run.settings.batch = 4;
  run.settings.initial_stddev = 0.15;
  run.settings.adamw.learning_rate = 3e-3;
  run.settings.adamw.min_learning_rate = 3e-4;
  run.settings.adamw.warmup_steps = std::min<std::int64_t>(2, steps);
  run.config = config_from(model_json);
  run.files.config_json = model_json;
  run.group = group_of(sequence_layout(parse_layout(layout)).num_ranks());
  run.settings.layout = to_string(sized_layout(parse_layout(layout), run.group.num_ranks));
  run.data = std::make_shared<const BatchOrder>(documents(),
                                                BatchOptions{.seq_len = run.settings.seq, .seed = run.settings.seed});
  run.save_every = 0;
  run.save_weights = false;
  run.measure_matrix_rate = false;
  return run;
}

/// Experts by global row (sequence · seq + position) of a step and layer, whoever had the tokens; played back to any
/// layout.
class RoutingTape {
 public:
  RoutingTape(std::int64_t seq, std::int64_t batch) : seq_(seq), batch_(batch) {}

  /// Of a run on one rank.
  void record(std::int64_t step, std::int64_t layer, const Routing& routing) {
    Routing& rows = tape_[{step, layer}];
    rows = routing;
    for (std::int64_t i = 0; i < seq_; ++i) {
      for (std::int64_t b = 0; b < batch_; ++b) copy_row(routing, i * batch_ + b, rows, b * seq_ + i);
    }
  }
  void set(std::int64_t step, std::int64_t layer, Routing rows) { tape_[{step, layer}] = std::move(rows); }

  /// What `rank` of a layout sees of it, kept here.
  void deal(const Layout& layout) {
    const SequenceLayout axes = sequence_layout(layout);
    const std::int64_t share = batch_ / axes.data_replicas;
    const TokenShards tokens = token_shards_of(layout, seq_, share);
    for (const auto& [key, rows] : tape_) {
      for (int rank = 0; rank < axes.num_ranks(); ++rank) {
        const int mine = rank % axes.sequence_ranks(), replica = rank / axes.sequence_ranks();
        Routing part{.num_tokens = tokens.rows(mine), .top_k = rows.top_k};
        part.experts.resize(static_cast<std::size_t>(part.num_tokens * part.top_k));
        std::int64_t row = 0;
        for (const IndexRange& range : tokens.positions(mine)) {
          for (std::int64_t position = range.begin; position < range.end(); ++position) {
            for (std::int64_t b = 0; b < share; ++b) {
              copy_row(rows, (replica * share + b) * seq_ + position, part, row++);
            }
          }
        }
        dealt_[{key.first, key.second, rank}] = std::move(part);
      }
    }
  }
  RoutingSource source(std::int64_t step, std::int64_t layer, int rank) const {
    const auto found = dealt_.find({step, layer, rank});
    if (found == dealt_.end()) return {};
    return {.kind = RoutingSource::Kind::replayed, .replay = &found->second};
  }

 private:
  static void copy_row(const Routing& from, std::int64_t from_row, Routing& to, std::int64_t to_row) {
    std::copy_n(from.experts.begin() + from_row * from.top_k, from.top_k, to.experts.begin() + to_row * from.top_k);
  }
  std::int64_t seq_, batch_;
  std::map<std::pair<std::int64_t, std::int64_t>, Routing> tape_;
  std::map<std::tuple<std::int64_t, std::int64_t, int>, Routing> dealt_;
};

/// A test's name from a layout or a path.
inline std::string plain_name(std::string text) {
  for (char& letter : text) letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return text;
}

}  // namespace isomer::testing
