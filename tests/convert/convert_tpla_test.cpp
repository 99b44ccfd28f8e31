// Conversion of checkpoints on disk: the same logits, everything else bit for bit, whole or not at all.
#include "convert/convert_tpla.h"

#include <gmock/gmock.h>

#include <cstring>

#include "convert/compare_logits.h"
#include "convert/convert_fixture.h"
#include "layers/reference/language_model.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using testing::SmallModel;
using ::testing::UnorderedElementsAre;

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(directory)) names.push_back(item.path().filename().string());
  return names;
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The last layer's output in float64 of 15 tokens.
std::vector<double> last_output(const fs::path& directory) {
  const ModelConfig config = load_model_config(directory.string());
  const auto weights = widened_model_weights(load_model_weights(Checkpoint::open(directory), config, DType::f64));
  LanguageModelReferenceInput input{.weights = weights};
  for (int i = 0; i < 15; ++i) {
    input.tokens.push_back((i * 7 + 3) % 48);
    input.targets.push_back((i * 5) % 48);
    input.segments.push_back(0);
    input.positions.push_back(i);
  }
  return language_model_reference(config, input, 1).layer_outputs.back();
}

bool is_rewritten(std::string_view name) {
  return name.find("kv_a_") != std::string_view::npos || name.find("kv_b_") != std::string_view::npos;
}

struct FileCase {
  std::string transform;
  SmallModel model;
  DType dtype;
  double bound;  // of the float64 forward's outputs, relative: what rounding the weights again may cost
};

class ConvertFile : public ::testing::TestWithParam<FileCase> {};

TEST_P(ConvertFile, KeepsTheLogitsAndEverythingElse) {
  const TempFolder folder;
  const fs::path model = testing::write_small_model(folder, GetParam().model, GetParam().dtype);
  TplaConversion conversion =
      testing::small_conversion(folder, {.transform = parse_tpla_transform(GetParam().transform)});
  convert_tpla(conversion, testing::small_text());
  EXPECT_THAT(names_in(conversion.out), UnorderedElementsAre("config.json", "model.safetensors",
                                                             "tokenizer_config.json", "tpla.json", "tpla.safetensors"));
  EXPECT_EQ(bytes_of(conversion.out / "config.json"), bytes_of(model / "config.json"));
  const Checkpoint before = Checkpoint::open(model), after = Checkpoint::open(conversion.out);
  ASSERT_EQ(before.names(), after.names());
  for (const std::string_view name : before.names()) {
    EXPECT_EQ(before.info(name).dtype, after.info(name).dtype) << name;
    EXPECT_EQ(before.bytes(name) == after.bytes(name), !is_rewritten(name)) << name;
  }
  const double difference = testing::max_relative_difference(last_output(conversion.out), last_output(model));
  EXPECT_LE(difference, GetParam().bound);
  EXPECT_GT(difference, 0);
}

// A rewritten weight is off by half an epsilon, relative; 4 matrices in 2 layers, amplified by residuals and norms.
constexpr double kBound = 16;
INSTANTIATE_TEST_SUITE_P(All, ConvertFile,
                         ::testing::Values(FileCase{"pca", {}, DType::f32, kBound * 0x1p-23},
                                           FileCase{"hadamard", {.bias = true}, DType::f32, kBound * 0x1p-23},
                                           FileCase{"query-aware", {.q_lora = false}, DType::f32, kBound * 0x1p-23},
                                           FileCase{"pca-centred", {.kv_norm = false}, DType::bf16, kBound * 0x1p-7},
                                           FileCase{"pca", {}, DType::bf16, kBound * 0x1p-7}),
                         [](const auto& instance) { return fmt::format("case{}", instance.index); });

TEST(Convert, TheForwardOfTrainingAgreesAndSoDoesItsReport) {
  const TempFolder folder;
  const fs::path model = testing::write_small_model(folder, {}, DType::f32);
  const TplaConversion conversion = testing::small_conversion(folder, {});
  const TplaConversionResult result = convert_tpla(conversion, testing::small_text());
  const ModelConfig config = load_model_config(model.string());
  const auto weights = [&](const fs::path& path) {
    return load_model_weights(Checkpoint::open(path), config, DType::f32);
  };
  const LogitDifference same =
      compare_logits(config, weights(model), weights(conversion.out), result.windows.held_out, 1, {});
  EXPECT_EQ(same.num_tokens, 20);  // a tenth of 19 windows
  EXPECT_GT(same.largest_logit, 0.1);
  EXPECT_LE(same.largest, 64 * 0x1p-23 * same.largest_logit);  // two float32 forwards
  EXPECT_EQ(same.top1_agreements, 20);
  EXPECT_LE(same.mean_divergence, 1e-9);
  EXPECT_NEAR(same.nats_first, same.nats_second, 1e-3);
  const LogitDifference other = compare_logits(config, weights(model), testing::small_weights(config, DType::f32, 77),
                                               result.windows.held_out, 1, {});
  EXPECT_GT(other.mean_divergence, 1e-3);
}

TEST(Convert, ThreadsChangeNoByteAndTheSeedDoes) {
  const TempFolder folder;
  testing::write_small_model(folder, {}, DType::bf16);
  const auto convert = [&](const char* name, int threads, std::uint64_t seed) {
    TplaConversion c =
        testing::small_conversion(folder, {.transform = TplaTransform::query_aware, .kappa = TplaKappa::lsq}, threads);
    c.out = folder.path() / name;
    c.calibration.seed = seed;
    convert_tpla(c, testing::small_text());
    std::string all;
    for (const char* file : {"model.safetensors", "tpla.safetensors", "tpla.json"}) all += bytes_of(c.out / file);
    return all;
  };
  const std::string one = convert("one", 1, 1);
  EXPECT_EQ(one, convert("three", 3, 1));
  EXPECT_NE(one, convert("seed", 1, 2));
}

TEST(Convert, LeastSquaresKappaIsOneForCentredPca) {
  // Over all keys the columns of centred PCA are uncorrelated; a causal query sees some of the keys, hence about 1.
  const TempFolder folder;
  testing::write_small_model(folder, {}, DType::f32);
  const auto kappas = [&](TplaTransform transform, const char* name) {
    TplaConversion c = testing::small_conversion(folder, {.transform = transform, .kappa = TplaKappa::lsq});
    c.out = folder.path() / name;
    const TplaConversionResult result = convert_tpla(c, testing::small_text());
    double sum = 0;
    for (const double kappa : result.side.layers[0].kappa) sum += kappa;
    return sum / static_cast<double>(result.side.layers[0].kappa.size());
  };
  EXPECT_NEAR(kappas(TplaTransform::pca_centred, "centred"), 1, 0.15);
}

TEST(Convert, WhatFailsLeavesNothing) {
  const TempFolder folder;
  testing::write_small_model(folder, {}, DType::f32);
  for (const std::string stage : {"calibrating", "rewriting", "writing: ", "writing the side file"}) {
    TplaConversion c = testing::small_conversion(folder, {});
    c.progress = [&](const std::string& what, std::int64_t, std::int64_t) {
      if (what.starts_with(stage)) throw Error("interrupted");
    };
    EXPECT_THAT(message_of([&] { convert_tpla(c, testing::small_text()); }), HasSubstr("interrupted")) << stage;
    EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("model"));
  }
}

TEST(Convert, WrongInputIsNamed) {
  const TempFolder folder;
  testing::write_small_model(folder, {.kv_lora_rank = 12}, DType::f32);
  const auto why = [&](const TplaOptions& options, std::int64_t tokens = 400) {
    return message_of([&] { convert_tpla(testing::small_conversion(folder, options), testing::small_text(tokens)); });
  };
  EXPECT_THAT(why({.num_shards = 5}), HasSubstr("--shards 5"));
  EXPECT_THAT(why({.transform = TplaTransform::hadamard}), HasSubstr("12, which is no power of two"));
  EXPECT_THAT(why({}, 30), HasSubstr("30 tokens of text make 1 windows of 20"));
  fs::create_directory(folder.path() / "out");
  EXPECT_THAT(why({}), HasSubstr("it is there already"));
  EXPECT_THAT(names_in(folder.path() / "out"), IsEmpty());
}

/// Puts raw tensors of types that Isomer only copies, and an FP8 matrix, into a checkpoint.
fs::path write_mixed_model(const TempFolder& folder, const std::string& fp8, const std::string& scale) {
  const ModelConfig config = testing::small_config({});
  std::vector<TensorSource> sources = model_tensor_sources(testing::small_weights(config, DType::bf16), DType::bf16);
  const std::string names[] = {"model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.o_proj.weight"};
  for (const std::string& name : names) {
    for (TensorSource& source : sources) {
      if (source.name != name) continue;
      const auto size = static_cast<std::size_t>(num_elements(source.shape));
      source.raw =
          TensorSource::Raw{FileDType::f8_e4m3, [&fp8, size] { return std::string_view(fp8).substr(0, size); }};
    }
    sources.push_back({.name = name + "_scale_inv",
                       .shape = {1, 1},
                       .raw = TensorSource::Raw{FileDType::f32, [&scale] { return std::string_view(scale); }}});
  }
  sources.push_back({.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                     .shape = {3},
                     .raw = TensorSource::Raw{FileDType::f16, [] { return std::string_view("abcdef"); }}});
  const fs::path directory = folder.path() / "model";
  write_checkpoint(directory, sources, 4096);
  nlohmann::json json = testing::config_json({});
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  std::ofstream(directory / "config.json") << json.dump(2);
  return directory;
}

TEST(Convert, Fp8IsWrittenAsBfloat16AndTheRestCopied) {
  const TempFolder folder;
  std::string fp8(4096, '\0');
  for (std::size_t i = 0; i < fp8.size(); ++i) fp8[i] = static_cast<char>((i * 37) % 0x40 + (i % 2) * 0x80);
  const float inverse = 0.25f;
  const std::string scale(reinterpret_cast<const char*>(&inverse), 4);
  const fs::path model = write_mixed_model(folder, fp8, scale);
  const TplaConversion conversion = testing::small_conversion(folder, {});
  const TplaConversionResult result = convert_tpla(conversion, testing::small_text());
  EXPECT_EQ(result.dequantised, 2);
  const Checkpoint before = Checkpoint::open(model), after = Checkpoint::open(conversion.out);
  EXPECT_EQ(after.names().size(), before.names().size() - 2);
  const std::string copied = "model.layers.0.self_attn.rotary_emb.inv_freq",
                    o_proj = "model.layers.1.self_attn.o_proj.weight";
  EXPECT_EQ(after.info(copied).dtype, FileDType::f16);
  EXPECT_EQ(after.bytes(copied), "abcdef");
  EXPECT_EQ(after.info(o_proj).dtype, FileDType::bf16);
  const Tensor expected = before.read(o_proj, DType::bf16);
  EXPECT_EQ(
      std::memcmp(after.read(o_proj, DType::bf16).raw(), expected.raw(), static_cast<std::size_t>(expected.nbytes())),
      0);
  EXPECT_EQ(bytes_of(conversion.out / "config.json").find("quantization_config"), std::string::npos);
  EXPECT_LE(testing::max_relative_difference(last_output(conversion.out), last_output(model)), kBound * 0x1p-7);
}

TEST(CalibrationWindows, HoldOutTheSameWhateverTheAmount) {
  const ModelConfig config = testing::small_config({});
  const TokenDataset text = testing::small_text(2000);
  const CalibrationWindows few = calibration_windows(text, config, {.tokens = 40, .window = 20, .held_out_windows = 3});
  const CalibrationWindows many =
      calibration_windows(text, config, {.tokens = 9999, .window = 20, .held_out_windows = 3});
  EXPECT_EQ(few.calibration.size(), 2u);
  EXPECT_EQ(many.calibration.size(), 99u - 3);
  ASSERT_EQ(few.held_out.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(few.held_out[i].ids, many.held_out[i].ids);
  EXPECT_THAT(message_of([&] { calibration_windows(text, config, {.window = 65}); }),
              HasSubstr("max_position_embeddings 64"));
}

}  // namespace
}  // namespace isomer
