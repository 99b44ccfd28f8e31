#include "convert/side_file.h"

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "convert/observed_forward.h"
#include "convert/rewrite.h"
#include "core/error.h"
#include "model/json_text.h"
#include "train/run_directory.h"

namespace isomer {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kJsonFile = "tpla.json";
constexpr auto kTensorFile = "tpla.safetensors";
constexpr auto kFormat = "isomer-tpla";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMaxJsonBytes = 1 << 20;
constexpr std::int64_t kMost = std::int64_t{1} << 53;

std::string hex(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

std::uint64_t hash_of_file(const fs::path& path) {
  const MappedFile file(path);
  return fnv1a({file.data(), static_cast<std::size_t>(file.bytes())});
}

/// The fields of an object in a file, each checked.
class Fields {
 public:
  Fields(const json& object, std::string source) : object_(object), source_(std::move(source)) {
    if (!object.is_object()) throw Error(fmt::format("{}: {}: expected an object", source_, brief(object)));
  }
  const json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) throw Error(fmt::format("{}: '{}' is missing", source_, key));
    return *found;
  }
  std::string text(const char* key) const {
    const json& value = at(key);
    if (!value.is_string()) complain(key, "a string");
    return value.get<std::string>();
  }
  std::int64_t integer(const char* key, std::int64_t least, std::int64_t most) const {
    const json& value = at(key);
    const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most)
                                                 : value.is_number_integer();
    if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      complain(key, fmt::format("a whole number from {} to {}", least, most));
    }
    return value.get<std::int64_t>();
  }
  std::uint64_t natural(const char* key) const {
    if (!at(key).is_number_unsigned()) complain(key, "a whole number from 0 to 2^64 - 1");
    return at(key).get<std::uint64_t>();
  }
  std::uint64_t hash(const char* key) const {
    const std::string value = text(key);
    if (value.size() != 16 || value.find_first_not_of("0123456789abcdef") != std::string::npos) {
      complain(key, "16 hexadecimal digits");
    }
    return std::stoull(value, nullptr, 16);
  }
  [[noreturn]] void complain(const char* key, const std::string& expected) const {
    throw Error(fmt::format("{}: '{}' is {}: expected {}", source_, key, brief(at(key)), expected));
  }
  const std::string& source() const { return source_; }

 private:
  const json& object_;
  std::string source_;
};

TplaOptions read_options(const Fields& fields, const ModelConfig& config) {
  try {
    const TplaOptions options{
        .transform = parse_tpla_transform(fields.text("transform")),
        .num_shards = static_cast<int>(fields.integer("shards", 1, std::numeric_limits<int>::max())),
        .shared_columns = fields.integer("shared_columns", 0, kMost),
        .rms = parse_tpla_rms(fields.text("rms")),
        .kappa = parse_tpla_kappa(fields.text("kappa"))};
    check_tpla_options(options, config);
    return options;
  } catch (const std::invalid_argument& error) {
    throw Error(fmt::format("{}: {}", fields.source(), error.what()));
  }
}

void check_model(const Fields& fields, const ModelConfig& config) {
  const auto same = [&](const char* key, std::int64_t ours) {
    const std::int64_t theirs = fields.integer(key, 0, kMost);
    if (theirs == ours) return;
    throw Error(fmt::format("{}: '{}' is {}, the model's config.json has {}: they don't belong together",
                            fields.source(), key, theirs, ours));
  };
  same("num_hidden_layers", config.num_hidden_layers);
  same("num_attention_heads", config.num_attention_heads);
  same("kv_lora_rank", config.kv_lora_rank);
  same("qk_rope_head_dim", config.qk_rope_head_dim);
}

std::vector<CalibrationFile> read_calibration_files(const Fields& calibration) {
  std::vector<CalibrationFile> result;
  const json& files = calibration.at("files");
  if (!files.is_array()) calibration.complain("files", "a list");
  for (const json& file : files) {
    const Fields entry(file, calibration.source() + ": 'files'");
    result.push_back({entry.text("name"), entry.integer("bytes", 0, kMost), entry.hash("hash")});
  }
  return result;
}

/// A float64 tensor of this shape, every value finite and within [least, most].
std::vector<double> read_values(const Checkpoint& file, const std::string& name, const Shape& shape, double least,
                                double most = std::numeric_limits<double>::max()) {
  const TensorInfo& info = file.info(name);
  if (info.dtype != FileDType::f64 || info.shape != shape) {
    throw Error(fmt::format("{}: at byte {}: '{}' is {} {}: expected F64 {}", file.path().string(), info.begin, name,
                            name_of(info.dtype), to_string(info.shape), to_string(shape)));
  }
  std::vector<double> values = widened(file.read(name, DType::f64));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= least && values[i] <= most) continue;
    throw Error(fmt::format("{}: '{}' has {} at {}: expected a finite value from {} to {}", file.path().string(), name,
                            values[i], i, least, most));
  }
  return values;
}

json side_json(const fs::path& directory, const TplaSideFile& side) {
  json files = json::array();
  for (const CalibrationFile& file : side.calibration) {
    files.push_back({{"name", printable(file.name)}, {"bytes", file.bytes}, {"hash", hex(file.hash)}});
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"isomer", side.isomer_version},
          {"transform", name_of(side.options.transform)},
          {"shards", side.options.num_shards},
          {"shared_columns", side.options.shared_columns},
          {"rms", name_of(side.options.rms)},
          {"kappa", name_of(side.options.kappa)},
          {"align_steps", side.align_steps},
          {"seed", side.seed},
          {"num_hidden_layers", side.layers.size()},
          {"num_attention_heads", side.num_heads},
          {"kv_lora_rank", side.kv_lora_rank},
          {"qk_rope_head_dim", side.qk_rope_head_dim},
          {"weights_hash", hex(side.weights_hash)},
          {"scalars_hash", hex(hash_of_file(directory / kTensorFile))},
          {"calibration", {{"files", files}, {"window", side.window}, {"tokens", side.calibration_tokens}}}};
}

}  // namespace

std::uint64_t fnv1a(std::string_view bytes, std::uint64_t state) {
  for (const char byte : bytes) state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return state;
}

std::uint64_t latent_weights_hash(const Checkpoint& checkpoint, const ModelConfig& config) {
  std::uint64_t state = kFnvBasis;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    for (const LatentWeightName& weight : latent_weight_names()) {
      const std::string name = fmt::format("model.layers.{}.{}", l, weight.name);
      if (!checkpoint.contains(name)) continue;
      const TensorInfo& info = checkpoint.info(name);
      state = fnv1a(fmt::format("{} {} {}\n", name, name_of(info.dtype), to_string(info.shape)), state);
      state = fnv1a(checkpoint.bytes(name), state);
    }
  }
  return state;
}

TplaSideFile parse_tpla_json(std::string_view text, const ModelConfig& config, const std::string& source) {
  const json root = parse_json(text, source);
  const Fields fields(root, source);
  if (fields.text("format") != kFormat) fields.complain("format", fmt::format("\"{}\"", kFormat));
  if (fields.integer("version", 1, kMost) != kVersion) {
    fields.complain("version", fmt::format("{}, the only one that this program knows", kVersion));
  }
  check_model(fields, config);
  TplaSideFile side{.options = read_options(fields, config),
                    .isomer_version = fields.text("isomer"),
                    .seed = fields.natural("seed"),
                    .weights_hash = fields.hash("weights_hash"),
                    .scalars_hash = fields.hash("scalars_hash"),
                    .num_heads = config.num_attention_heads,
                    .kv_lora_rank = config.kv_lora_rank,
                    .qk_rope_head_dim = config.qk_rope_head_dim};
  side.align_steps = fields.integer("align_steps", 0, kMost);
  const Fields calibration(fields.at("calibration"), source + ": 'calibration'");
  side.window = calibration.integer("window", 1, kMost);
  side.calibration_tokens = calibration.integer("tokens", 1, kMost);
  side.calibration = read_calibration_files(calibration);
  return side;
}

std::vector<TplaLayer> read_tpla_scalars(const fs::path& path, const ModelConfig& config, const TplaOptions& options) {
  const Checkpoint file = Checkpoint::open(path);
  const std::int64_t g = options.num_shards, h = config.num_attention_heads, d = config.kv_lora_rank;
  std::vector<TplaLayer> layers;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const auto values = [&](const char* what, const Shape& shape, double least, double most) {
      return read_values(file, fmt::format("layers.{}.{}", l, what), shape, least, most);
    };
    constexpr double kLargest = std::numeric_limits<double>::max();
    layers.push_back({.kappa = values("kappa", {h, g}, -kLargest, kLargest),
                      .rms_scale = values("rms_scale", {g}, std::numeric_limits<double>::min(), kLargest),
                      .shares = values("shares", {g}, 0, 1),
                      .moments = values("moments", {d}, 0, kLargest)});
  }
  const auto expected = static_cast<std::size_t>(4 * config.num_hidden_layers);
  if (file.names().size() != expected) {
    throw Error(fmt::format("{}: {} tensors: expected {}", path.string(), file.names().size(), expected));
  }
  return layers;
}

void write_tpla_side_file(const fs::path& directory, const TplaSideFile& side) {
  std::vector<TensorSource> tensors;
  const auto g = static_cast<std::int64_t>(side.options.num_shards);
  const auto add = [&](std::size_t layer, const char* what, const std::vector<double>& values, Shape shape) {
    const std::string name = fmt::format("layers.{}.{}", layer, what);
    const Tensor tensor = Tensor::unrecorded(name, DType::f64, std::move(shape));
    ISOMER_CHECK(tensor.numel() == std::ssize(values), "{}: {} values", name, values.size());
    std::copy(values.begin(), values.end(), tensor.data<double>());
    tensors.push_back(tensor_source(name, tensor));
  };
  for (std::size_t l = 0; l < side.layers.size(); ++l) {
    const TplaLayer& layer = side.layers[l];
    add(l, "kappa", layer.kappa, {std::ssize(layer.kappa) / g, g});
    add(l, "rms_scale", layer.rms_scale, {g});
    add(l, "shares", layer.shares, {g});
    add(l, "moments", layer.moments, {std::ssize(layer.moments)});
  }
  write_safetensors(directory / kTensorFile, tensors);
  write_text_atomically(directory / kJsonFile, side_json(directory, side).dump(2) + "\n");
}

TplaSideFile load_tpla_side_file(const fs::path& directory, const ModelConfig& config, const Checkpoint& checkpoint) {
  std::error_code code;
  for (const char* file : {kJsonFile, kTensorFile}) {
    if (fs::is_regular_file(directory / file, code)) continue;
    throw Error(fmt::format("{}: {} is missing, so its latent can't be sharded; make it with isomer convert tpla",
                            directory.string(), file));
  }
  const fs::path path = directory / kJsonFile;
  TplaSideFile side = parse_tpla_json(read_text_file(path, kMaxJsonBytes), config, path.string());
  if (const std::uint64_t ours = hash_of_file(directory / kTensorFile); side.scalars_hash != ours) {
    throw Error(fmt::format("{}: {} has hash {}, not {}: one of the two files is of another conversion", path.string(),
                            kTensorFile, hex(ours), hex(side.scalars_hash)));
  }
  const std::uint64_t ours = latent_weights_hash(checkpoint, config);
  if (side.weights_hash != ours) {
    throw Error(fmt::format("{}: made for weights with hash {}, these have {}: convert them anew", path.string(),
                            hex(side.weights_hash), hex(ours)));
  }
  side.layers = read_tpla_scalars(directory / kTensorFile, config, side.options);
  return side;
}

}  // namespace isomer
