// Small models with every part an engine may meet, and what float64 says of their logits.
#pragma once

#include <cmath>
#include <mutex>

#include "comm/communicator.h"
#include "comm/group.h"
#include "infer/engine.h"
#include "layers/reference/language_model.h"
#include "tensor_values.h"

namespace isomer::testing {

using Ids = std::vector<std::int32_t>;

/// Latent attention with YaRN beyond its original context, one dense layer, then V3's mixture of experts.
inline ModelConfig latent_config() {
  ModelConfig c;
  c.name = "small-latent";
  c.attention = AttentionKind::mla;
  c.vocab_size = 61;
  c.hidden_size = 40;
  c.intermediate_size = 37;  // uneven over ranks
  c.num_hidden_layers = 3;
  c.num_attention_heads = c.num_key_value_heads = 4;
  c.q_lora_rank = 20;
  c.kv_lora_rank = 24;
  c.qk_nope_head_dim = 12;
  c.qk_rope_head_dim = 8;
  c.v_head_dim = 14;
  c.attention_bias = true;
  c.max_position_embeddings = 1024;
  c.rope.scaling = RopeScalingKind::yarn;
  c.rope.factor = 8;
  c.rope.original_max_position_embeddings = 128;
  c.rope.mscale_all_dim = 1;
  c.moe = {.n_routed_experts = 8,
           .num_experts_per_tok = 2,
           .n_shared_experts = 1,
           .moe_intermediate_size = 18,
           .first_k_dense_replace = 1,
           .n_group = 4,
           .topk_group = 2,
           .norm_topk_prob = true,
           .routed_scaling_factor = 2.5,
           .router = RouterKind::sigmoid_noaux_tc};
  return c;
}

/// Grouped-query attention with Qwen2's biases and MiniCPM's scales; a tied head.
inline ModelConfig grouped_config() {
  ModelConfig c;
  c.name = "small-grouped";
  c.model_type = "qwen2";
  c.attention = AttentionKind::gqa;
  c.vocab_size = 61;
  c.hidden_size = 40;
  c.intermediate_size = 37;
  c.num_hidden_layers = 3;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 2;
  c.head_dim = 10;
  c.attention_bias = true;
  c.tie_word_embeddings = true;
  c.max_position_embeddings = 1024;
  c.rope.interleave = false;
  c.scale_emb = 1.7;
  c.scale_depth = 1.9;
  c.dim_model_base = 30;
  return c;
}

/// Values that float32 and bfloat16 hold exactly, so that every dtype has the same model; logits have real spread.
inline ModelWeights noisy_weights(const ModelConfig& config, DType dtype) {
  std::uint64_t seed = 7;
  const ModelWeights slots = initial_model_weights(config, 1, DType::f32);
  std::map<std::string, Tensor> made;
  slots.for_each([&](const std::string& name, const Tensor& t) {
    const double deviation = t.dim() == 1 ? 0.3 : 1.6 / std::sqrt(static_cast<double>(t.size(1)));
    const bool is_norm = name.ends_with("norm.weight"), is_choice = name.ends_with("e_score_correction_bias");
    const auto values =
        rounded(noise_values(++seed, t.numel(), is_choice ? 0.05 : deviation, is_norm ? 1 : 0), DType::bf16);
    made[name] = tensor_of(values, is_choice && dtype == DType::bf16 ? DType::f32 : dtype, t.shape());
  });
  return make_model_weights(config, [&](const std::string& name, const Shape&) {
    const auto found = made.find(name);
    return found == made.end() ? Tensor() : found->second;
  });
}

inline Ids some_ids(std::int64_t count, std::uint64_t seed = 3, std::int64_t vocabulary = 61) {
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<std::int32_t>((noise(seed, static_cast<std::uint64_t>(i)) / 3.4642 + 0.5) *
                                            static_cast<double>(vocabulary)));
  }
  return ids;
}

/// Logits [T·V] of the whole sequence in float64, from the reference of the training code.
inline std::vector<double> reference_logits(const ModelConfig& config, const Ids& ids) {
  const auto weights = widened_model_weights(noisy_weights(config, DType::f64));
  LanguageModelReferenceInput input{.weights = weights, .tokens = ids, .targets = Ids(ids.size(), 0)};
  input.segments.assign(ids.size(), 0);
  input.run_length = config.max_position_embeddings;
  for (std::size_t i = 0; i < ids.size(); ++i) input.positions.push_back(static_cast<std::int64_t>(i));
  const std::vector<double> x = language_model_reference(config, input, 2).layer_outputs.back();
  const auto& norm = weights.at("model.norm.weight");
  const auto& head = weights.at(config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
  const auto hidden = static_cast<std::size_t>(config.hidden_size), vocab = static_cast<std::size_t>(config.vocab_size);
  const double scale = config.dim_model_base > 0 ? config.dim_model_base / static_cast<double>(hidden) : 1;
  std::vector<double> logits(ids.size() * vocab);
  for (std::size_t t = 0; t < ids.size(); ++t) {
    double squares = 0;
    for (std::size_t i = 0; i < hidden; ++i) squares += x[t * hidden + i] * x[t * hidden + i];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(hidden) + config.rms_norm_eps);
    for (std::size_t v = 0; v < vocab; ++v) {
      double sum = 0;
      for (std::size_t i = 0; i < hidden; ++i) sum += head[v * hidden + i] * x[t * hidden + i] * rstd * norm[i];
      logits[t * vocab + v] = scale * sum;
    }
  }
  return logits;
}

inline int ranks_of(const std::string& layout, const ModelConfig& config) {
  return parse_decode_layout(layout, config).devices();
}

/// Layouts that the engine runs for a model.
inline std::vector<std::string> all_layouts(const ModelConfig& config) {
  std::vector<std::string> layouts = {"tp:1",
                                      "tp:2",
                                      "tp:4",
                                      "kvp:2",
                                      "kvp:4",
                                      "medha:kvp=2,tpa=2",
                                      "pp:3",
                                      "tp:2,pp:2",
                                      "medha:kvp=3,tpa=1",
                                      "helix:kvp=4,tpa=1",
                                      "helix:kvp=3,tpa=1,q=gather",
                                      "helix:kvp=2,tpa=2,hopb=off"};
  if (config.attention == AttentionKind::mla) {
    layouts.insert(layouts.end(), {"helix:kvp=2,tpa=2,wuv=before,hopb=off", "gla:g=2,tp=1", "gla:g=2,tp=2",
                                   "exact-latent:2", "exact-latent:4,rope=split"});
  }
  if (config.moe.n_routed_experts > 0) {
    layouts.insert(layouts.end(), {"tp:4,ep=2", "kvp:2,ep=2", "medha:kvp=2,tpa=2,ep=2",
                                   "helix:kvp=4,tpa=1,tpf=2,ep=2,experts=gather,q=gather,absorb=before"});
  }
  return layouts;
}

struct EngineRun {
  std::string layout = "tp:1";
  std::int64_t prompt = 0;  // tokens prefilled
  std::int64_t prefill_chunk = 512;
  std::vector<std::int64_t> steps = {1};  // new tokens of each decode step, in turn
  std::optional<DType> cache_dtype = std::nullopt;
  std::int64_t page_tokens = 8;
  int threads = 1;
  std::shared_ptr<const TplaModel> tpla = nullptr;
};

/// Runs body(ctx, engine) on every rank of a layout, what nobody owns being poison.
template <class Body>
void with_engine(const EngineRun& run, const ModelConfig& config, const ModelWeights& weights,
                 std::int64_t cache_tokens, Body&& body) {
  const DecodeLayout layout = parse_decode_layout(run.layout, config);
  GroupOptions group{.num_ranks = layout.devices(), .threads_per_rank = run.threads};
  group.timeout_s = 20;
  run_group(group, [&](RankContext& ctx) {
    ctx.memory().poison = true;
    Engine engine(ctx,
                  {.config = config,
                   .layout = layout,
                   .tpla = run.tpla,
                   .cache_dtype = run.cache_dtype,
                   .cache_tokens = cache_tokens,
                   .page_tokens = run.page_tokens,
                   .prefill_chunk = run.prefill_chunk},
                  weights);
    body(ctx, engine);
  });
}

/// Logits [T·V] of all positions: a prefill of run.prompt tokens, then decode steps. Every rank must have the same.
inline std::vector<double> engine_logits(const EngineRun& run, const ModelConfig& config, const ModelWeights& weights,
                                         const Ids& ids) {
  std::vector<std::vector<double>> of_rank(static_cast<std::size_t>(ranks_of(run.layout, config)));
  with_engine(run, config, weights, static_cast<std::int64_t>(ids.size()), [&](RankContext& ctx, Engine& engine) {
    auto& logits = of_rank[static_cast<std::size_t>(ctx.rank())];
    const auto append = [&](const Tensor& part) {
      const auto values = values_of(part);
      logits.insert(logits.end(), values.begin(), values.end());
    };
    const int sequence = engine.add_sequence();
    const std::span<const std::int32_t> all(ids);
    if (run.prompt > 0) {
      append(engine.prefill(ctx, sequence, all.first(static_cast<std::size_t>(run.prompt)), LogitRows::all));
    }
    for (std::size_t step = 0; engine.length(sequence) < static_cast<std::int64_t>(ids.size()); ++step) {
      const auto done = static_cast<std::size_t>(engine.length(sequence));
      const auto count = std::min(ids.size() - done, static_cast<std::size_t>(run.steps[step % run.steps.size()]));
      const Engine::Input input{sequence, all.subspan(done, count)};
      append(engine.decode(ctx, {&input, 1}));
    }
  });
  for (const auto& logits : of_rank) {
    if (logits != of_rank[0]) return {};
  }
  return of_rank[0];
}

}  // namespace isomer::testing
