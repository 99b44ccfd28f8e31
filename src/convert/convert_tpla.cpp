#include "convert/convert_tpla.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "convert/observed_forward.h"
#include "convert/rewrite.h"
#include "convert/staged_directory.h"
#include "core/error.h"
#include "model/json_text.h"
#include "model/model_weights.h"
#include "model/tokenizer.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;

/// What stands beside the weights of a Hugging Face directory and belongs to the model.
constexpr std::array kCompanions = {"tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "generation_config.json",
                                    "chat_template.jinja",
                                    "tokenizer.model",
                                    "configuration_deepseek.py",
                                    "modeling_deepseek.py",
                                    "LICENSE"};

std::string layer_name(std::int64_t layer, std::string_view slot) {
  return fmt::format("model.layers.{}.{}", layer, slot);
}

/// The latent's weights of one layer, float64, shapes held against the configuration.
LatentWeights load_latent_weights(const Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer) {
  const AttentionWeights loaded = load_attention_weights(checkpoint, config, layer, DType::f64);
  LatentWeights weights{.kv_a = widened(loaded.kv_a_proj), .kv_b = widened(loaded.kv_b_proj)};
  if (loaded.kv_a_bias) weights.kv_a_bias = widened(loaded.kv_a_bias);
  if (loaded.kv_a_layernorm) weights.gamma = widened(loaded.kv_a_layernorm);
  return weights;
}

/// The dtype that a rewritten tensor is rounded to: the file's, BF16 for FP8, F32 for F16 (which has no writer).
DType dtype_written(FileDType dtype) {
  if (const auto same = same_bits(dtype)) return *same;
  return dtype == FileDType::f16 ? DType::f32 : DType::bf16;
}

/// float64 values, rounded once.
Tensor rounded_tensor(const std::string& name, const std::vector<double>& values, DType dtype, const Shape& shape) {
  Tensor tensor = Tensor::unrecorded(name, dtype, shape);
  ISOMER_CHECK(tensor.numel() == std::ssize(values), "{}: {} values for {}", name, values.size(), to_string(shape));
  convert_elements(FileDType::f64, values.data(), tensor.numel(), dtype, tensor.raw());
  return tensor;
}

/// Everything between reading the model and writing the new one.
class Converter {
 public:
  Converter(const TplaConversion& conversion, const TokenDataset& text)
      : conversion_(conversion),
        config_(load_model_config(conversion.model.string())),
        checkpoint_(Checkpoint::open(conversion.model)) {
    check_tpla_options(conversion.options, config_);
    result_.windows = calibration_windows(text, config_, conversion.calibration);
  }

  void calibrate();
  TplaConversionResult write();

 private:
  void progress(const std::string& what, std::int64_t done) const {
    if (conversion_.progress) conversion_.progress(what, done, config_.num_hidden_layers);
  }
  void rewrite_layer(const LayerMoments& moments, std::int64_t layer);
  std::vector<ShardedLayer> sharded_layers() const;
  void fit_kappa(const ModelWeights& weights);
  void align(const ModelWeights& weights);
  TensorSource source_of(const std::string& name, std::map<std::string, const std::vector<double>*>& rewritten);
  std::vector<TensorSource> sources();
  std::string config_text() const;

  const TplaConversion& conversion_;
  const ModelConfig config_;
  const Checkpoint checkpoint_;
  std::vector<LatentWeights> rewritten_;        // by layer
  std::vector<std::vector<double>> rotations_;  // by layer, U
  TplaConversionResult result_;
};

void Converter::rewrite_layer(const LayerMoments& moments, std::int64_t layer) {
  progress("rewriting: layer", layer);
  LatentWeights original = load_latent_weights(checkpoint_, config_, layer);
  std::vector<double> u = tpla_transform(conversion_.options.transform, {.config = config_,
                                                                         .moments = moments,
                                                                         .kv_b = original.kv_b,
                                                                         .gamma = original.gamma,
                                                                         .seed = conversion_.calibration.seed,
                                                                         .layer = layer});
  result_.side.layers.push_back(tpla_layer(conversion_.options, config_, column_moments(moments, u)));
  rewritten_.push_back(rewrite_latent(config_, std::move(original), u, conversion_.num_threads));
  rotations_.push_back(std::move(u));
}

std::vector<ShardedLayer> Converter::sharded_layers() const {
  std::vector<ShardedLayer> layers;
  for (std::size_t l = 0; l < rewritten_.size(); ++l) {
    layers.push_back({result_.side.layers[l], rewritten_[l].kv_b, rewritten_[l].gamma, rotations_[l]});
  }
  return layers;
}

void Converter::align(const ModelWeights& weights) {
  result_.aligned = align_layers(config_, weights, conversion_.options, sharded_layers(), result_.windows.calibration,
                                 conversion_.alignment, conversion_.num_threads, conversion_.progress);
  for (std::size_t l = 0; l < rewritten_.size(); ++l) rewritten_[l].kv_b = std::move(result_.aligned[l].kv_b);
}

void Converter::fit_kappa(const ModelWeights& weights) {
  const std::vector<ShardedLayer> layers = sharded_layers();
  const std::vector<HeadSums> sums =
      measure_shards(config_, weights, conversion_.options, layers, result_.windows.calibration,
                     conversion_.num_threads, conversion_.progress);
  for (std::size_t l = 0; l < sums.size(); ++l) result_.side.layers[l].kappa = sums[l].least_squares_kappa();
}

void Converter::calibrate() {
  const ModelWeights weights = load_model_weights(checkpoint_, config_, DType::f32);
  const std::vector<LayerMoments> moments =
      collect_moments(config_, weights, result_.windows.calibration, conversion_.num_threads, conversion_.progress);
  for (std::int64_t l = 0; l < config_.num_hidden_layers; ++l) rewrite_layer(moments[static_cast<std::size_t>(l)], l);
  if (conversion_.options.kappa == TplaKappa::lsq) fit_kappa(weights);
  if (conversion_.alignment.steps > 0) align(weights);
}

TensorSource Converter::source_of(const std::string& name,
                                  std::map<std::string, const std::vector<double>*>& rewritten) {
  const TensorInfo& info = checkpoint_.info(name);
  if (const auto found = rewritten.find(name); found != rewritten.end()) {
    const DType dtype = dtype_written(info.dtype);
    result_.dequantised += info.dtype == FileDType::f8_e4m3 ? 1 : 0;
    return {.name = name,
            .dtype = dtype,
            .shape = info.shape,
            .make = [name, dtype, shape = info.shape, values = found->second] {
              return rounded_tensor(name, *values, dtype, shape);
            }};
  }
  if (checkpoint_.is_gguf()) {
    const DType dtype = dtype_written(info.dtype);
    return {.name = name, .dtype = dtype, .shape = info.shape, .make = [this, name, dtype] {
              return checkpoint_.read(name, dtype);
            }};
  }
  if (info.dtype == FileDType::f8_e4m3) {
    ++result_.dequantised;
    return {.name = name, .dtype = DType::bf16, .shape = info.shape, .make = [this, name] {
              return checkpoint_.read(name, DType::bf16);
            }};
  }
  return {.name = name, .shape = info.shape, .raw = TensorSource::Raw{info.dtype, [this, name] {
                                                                        return checkpoint_.bytes(name);
                                                                      }}};
}

std::vector<TensorSource> Converter::sources() {
  std::map<std::string, const std::vector<double>*> rewritten;
  for (std::size_t l = 0; l < rewritten_.size(); ++l) {
    for (const LatentWeightName& weight : latent_weight_names()) {
      const std::string name = layer_name(static_cast<std::int64_t>(l), weight.name);
      if (checkpoint_.contains(name)) rewritten[name] = &(rewritten_[l].*weight.member);
    }
  }
  constexpr std::string_view kScales = "_scale_inv";
  std::vector<TensorSource> result;
  for (const std::string_view name : checkpoint_.names()) {
    // The scales of what is written without them.
    if (name.ends_with(kScales)) {
      const std::string_view scaled = name.substr(0, name.size() - kScales.size());
      if (checkpoint_.contains(scaled) && checkpoint_.info(scaled).dtype == FileDType::f8_e4m3) continue;
    }
    result.push_back(source_of(std::string(name), rewritten));
  }
  return result;
}

/// As it stands; without the quantisation where that was undone.
std::string Converter::config_text() const {
  std::string text = load_model_config_text(conversion_.model.string());
  if (result_.dequantised == 0) return text;
  auto root = nlohmann::ordered_json::parse(text);
  root.erase("quantization_config");
  return root.dump(2) + "\n";
}

TplaConversionResult Converter::write() {
  StagedDirectory staged(conversion_.out);
  progress("writing: layer", 0);
  const fs::path& directory = staged.path();
  write_checkpoint(directory, sources(), conversion_.max_shard_bytes, checkpoint_.metadata());
  progress("writing the side file: layer", config_.num_hidden_layers);
  write_text_atomically(directory / "config.json", config_text());
  if (checkpoint_.is_gguf() && Tokenizer::is_at(conversion_.model)) {
    const TokenizerTexts texts = Tokenizer::texts_at(conversion_.model);
    write_text_atomically(directory / "tokenizer.json", texts.json);
    write_text_atomically(directory / "tokenizer_config.json", texts.config_json);
  }
  for (const char* name : kCompanions) {
    std::error_code code;
    if (fs::is_regular_file(conversion_.model / name, code)) {
      fs::copy_file(conversion_.model / name, directory / name, code);
      if (code) throw Error(fmt::format("{}: {}", (directory / name).string(), code.message()));
    }
  }
  TplaSideFile& side = result_.side;
  side.options = conversion_.options;
  side.isomer_version = ISOMER_VERSION;
  side.seed = conversion_.calibration.seed;
  side.weights_hash = latent_weights_hash(Checkpoint::open(directory), config_);
  side.num_heads = config_.num_attention_heads;
  side.kv_lora_rank = config_.kv_lora_rank;
  side.qk_rope_head_dim = config_.qk_rope_head_dim;
  side.calibration = conversion_.files;
  side.align_steps = conversion_.alignment.steps;
  side.window = result_.windows.window;
  side.calibration_tokens = std::ssize(result_.windows.calibration) * side.window;
  write_tpla_side_file(directory, side);
  staged.publish();
  return std::move(result_);
}

}  // namespace

CalibrationFile describe_calibration_file(const fs::path& path) {
  const MappedFile file(path);
  return {.name = path.filename().string(),
          .bytes = file.bytes(),
          .hash = fnv1a({file.data(), static_cast<std::size_t>(file.bytes())})};
}

TplaConversionResult convert_tpla(const TplaConversion& conversion, const TokenDataset& text) {
  StagedDirectory::refuse_existing(conversion.out);
  Converter converter(conversion, text);
  converter.calibrate();
  return converter.write();
}

}  // namespace isomer
