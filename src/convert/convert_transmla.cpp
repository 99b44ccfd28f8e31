#include "convert/convert_transmla.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "convert/layer_inputs.h"
#include "convert/observed_forward.h"
#include "convert/staged_directory.h"
#include "core/error.h"
#include "kernels/reference/blocked_ops.h"
#include "model/checkpoint.h"
#include "model/model_weights.h"
#include "model/tokenizer.h"
#include "model/tokenizer_trainer.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

class Converter {
 public:
  Converter(const TransMlaConversion& conversion, const TokenDataset& text)
      : conversion_(conversion),
        config_(load_model_config(conversion.model.string())),
        config_text_(load_model_config_text(conversion.model.string())) {
    check_transmla_options(conversion.options, config_);
    check_block_align_options(conversion.align);
    windows_ = calibration_windows(text, config_, conversion.calibration);
    original_ = load_model_weights(Checkpoint::open(conversion.model), config_, DType::f32);
    for (const LayerWeights& layer : original_.layers) {
      const AttentionWeights& w = layer.attention;
      if (w.q_bias || w.k_bias || w.v_bias || w.o_bias) {
        invalid_argument("{}: its attention has biases, for which the latent layout has no place", config_.name);
      }
    }
    result_.window = windows_.window;
    result_.calibration_tokens = std::ssize(windows_.calibration) * windows_.window;
  }

  TransMlaResult run() {
    moments_ =
        collect_input_moments(config_, original_, windows_.calibration, conversion_.num_threads, conversion_.progress);
    for (std::size_t l = 0; l < original_.layers.size(); ++l) {
      rotations_.push_back(
          rotate_keys(config_, conversion_.options, widened(original_.layers[l].attention.k_proj), moments_[l]));
    }
    const bool exact = conversion_.options.freqfold == 1;
    report(exact ? "keys rotated, all roped (exact)" : "keys rotated and folded, all roped", TransMlaStep::rotated);
    report("RoPE dropped beyond r", TransMlaStep::rope_dropped);
    ModelWeights reduced = report("PCA to d", TransMlaStep::reduced);
    const ModelConfig config = config_after(TransMlaStep::reduced);
    if (conversion_.align.minutes > 0 || conversion_.align.steps > 0) {
      result_.aligned = align_blocks({config_, original_}, config, reduced, windows_.calibration, conversion_.align,
                                     conversion_.num_threads, conversion_.progress);
      compare("aligned, layer by layer", config, reduced);
    }
    write(config, reduced);
    return std::move(result_);
  }

 private:
  ModelConfig config_after(TransMlaStep step) const {
    return transmla_config(config_, conversion_.options, step, rotations_.front().frequency);
  }

  void compare(const std::string& name, const ModelConfig& config, const ModelWeights& weights) {
    result_.steps.push_back({name, config.latent_width(),
                             compare_logits({config_, original_}, {config, weights}, windows_.held_out,
                                            conversion_.num_threads, conversion_.progress)});
  }

  ModelWeights report(const std::string& name, TransMlaStep step) {
    ModelWeights weights = original_;  // what isn't attention is shared
    for (std::size_t l = 0; l < weights.layers.size(); ++l) {
      if (conversion_.progress) conversion_.progress(name + ": layer", std::ssize(rotations_), std::ssize(rotations_));
      weights.layers[l].attention =
          transmla_layer(config_, conversion_.options, step, original_.layers[l].attention, rotations_[l], moments_[l]);
    }
    compare(name, config_after(step), weights);
    return weights;
  }

  /// The original's config.json, its attention replaced.
  std::string config_json(const ModelConfig& config) const {
    auto json = nlohmann::ordered_json::parse(config_text_);
    json["architectures"] = nlohmann::ordered_json::array({"DeepseekV2ForCausalLM"});
    json["model_type"] = config.model_type;
    json["num_key_value_heads"] = config.num_key_value_heads;
    json["q_lora_rank"] = nullptr;
    json["kv_lora_rank"] = config.kv_lora_rank;
    json["qk_nope_head_dim"] = config.qk_nope_head_dim;
    json["qk_rope_head_dim"] = config.qk_rope_head_dim;
    json["v_head_dim"] = config.v_head_dim;
    json["kv_a_layernorm"] = false;
    json["rope_interleave"] = true;
    json["attention_bias"] = false;
    json["tie_word_embeddings"] = config.tie_word_embeddings;
    json["first_k_dense_replace"] = config.num_hidden_layers;
    json["torch_dtype"] = conversion_.dtype == DType::bf16 ? "bfloat16" : "float32";
    json.erase("head_dim");
    return json.dump(2) + "\n";
  }

  void write(const ModelConfig& config, const ModelWeights& weights) const {
    StagedDirectory staged(conversion_.out);
    write_checkpoint(staged.path(), model_tensor_sources(weights, conversion_.dtype), conversion_.max_shard_bytes);
    write_text_atomically(staged.path() / "config.json", config_json(config));
    if (Tokenizer::is_at(conversion_.model)) {
      const TokenizerTexts texts = Tokenizer::texts_at(conversion_.model);
      write_text_atomically(staged.path() / "tokenizer.json", texts.json);
      if (!texts.config_json.empty()) write_text_atomically(staged.path() / "tokenizer_config.json", texts.config_json);
    }
    staged.publish();
  }

  const TransMlaConversion& conversion_;
  const ModelConfig config_;
  const std::string config_text_;
  CalibrationWindows windows_;
  ModelWeights original_;
  std::vector<InputMoment> moments_;    // by layer
  std::vector<KeyRotation> rotations_;  // by layer
  TransMlaResult result_;
};

}  // namespace

TransMlaResult convert_transmla(const TransMlaConversion& conversion, const TokenDataset& text) {
  StagedDirectory::refuse_existing(conversion.out);
  return Converter(conversion, text).run();
}

}  // namespace isomer
