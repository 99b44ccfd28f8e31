// The side file comes back as it was written, and refuses whatever is not its own.
#include "convert/side_file.h"

#include <gmock/gmock.h>

#include "convert/convert_fixture.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using testing::message_of;

/// A converted model and its side file's JSON, which a test spoils.
class SideFile : public ::testing::Test {
 protected:
  SideFile() {
    testing::write_small_model(folder_, {}, DType::f32);
    conversion_ = testing::small_conversion(
        folder_, {.num_shards = 2, .shared_columns = 4, .rms = TplaRms::sliced, .kappa = TplaKappa::lsq});
    written_ = convert_tpla(conversion_, testing::small_text()).side;
    config_ = load_model_config(conversion_.out.string());
    std::ifstream(conversion_.out / "tpla.json") >> json_;
  }
  TplaSideFile load() const { return load_tpla_side_file(conversion_.out, config_, Checkpoint::open(conversion_.out)); }
  std::string why_with(const json& side) const {
    std::ofstream(conversion_.out / "tpla.json") << side.dump();
    return message_of([&] { load(); });
  }
  std::string why_with(const char* key, const json& value) const {
    json spoilt = json_;
    spoilt[key] = value;
    return why_with(spoilt);
  }

  TempFolder folder_;
  TplaConversion conversion_;
  TplaSideFile written_;
  ModelConfig config_;
  json json_;
};

TEST_F(SideFile, ComesBackAsItWas) {
  const TplaSideFile read = load();
  EXPECT_EQ(read.options.num_shards, 2);
  EXPECT_EQ(read.options.shared_columns, 4);
  EXPECT_EQ(read.options.transform, TplaTransform::pca);
  EXPECT_EQ(read.options.rms, TplaRms::sliced);
  EXPECT_EQ(read.options.kappa, TplaKappa::lsq);
  EXPECT_EQ(read.seed, 1u);
  EXPECT_EQ(read.window, 20);
  EXPECT_EQ(read.calibration_tokens, 200);
  ASSERT_EQ(read.calibration.size(), 1u);
  EXPECT_EQ(read.calibration[0].name, "text");
  EXPECT_EQ(read.calibration[0].hash, 7u);
  ASSERT_EQ(read.layers.size(), 2u);
  for (std::size_t l = 0; l < 2; ++l) {
    EXPECT_EQ(read.layers[l].kappa, written_.layers[l].kappa);
    EXPECT_EQ(read.layers[l].rms_scale, written_.layers[l].rms_scale);
    EXPECT_EQ(read.layers[l].shares, written_.layers[l].shares);
    EXPECT_EQ(read.layers[l].moments, written_.layers[l].moments);
  }
}

TEST_F(SideFile, MissingIsNamedWithItsRemedy) {
  fs::remove(conversion_.out / "tpla.safetensors");
  EXPECT_THAT(message_of([&] { load(); }), HasSubstr("tpla.safetensors is missing"));
  fs::remove(conversion_.out / "tpla.json");
  EXPECT_THAT(message_of([&] { load(); }), HasSubstr("make it with isomer convert tpla"));
}

TEST_F(SideFile, EveryFieldIsChecked) {
  EXPECT_THAT(why_with("format", "other"), HasSubstr("'format' is"));
  EXPECT_THAT(why_with("version", 2), HasSubstr("'version' is 2: expected 1"));
  EXPECT_THAT(why_with("shards", 0), HasSubstr("a whole number from 1"));
  EXPECT_THAT(why_with("shards", 5), HasSubstr("--shards 5"));
  EXPECT_THAT(why_with("shards", 1.5), HasSubstr("'shards' is 1.5"));
  EXPECT_THAT(why_with("shared_columns", -1), HasSubstr("'shared_columns' is -1"));
  EXPECT_THAT(why_with("shared_columns", 18446744073709551615u), HasSubstr("'shared_columns' is"));
  EXPECT_THAT(why_with("transform", "svd"), HasSubstr("expected one of"));
  EXPECT_THAT(why_with("rms", json::array()), HasSubstr("'rms' is"));
  EXPECT_THAT(why_with("kv_lora_rank", 32), HasSubstr("they don't belong together"));
  EXPECT_THAT(why_with("weights_hash", "xyz"), HasSubstr("16 hexadecimal digits"));
  EXPECT_THAT(why_with("weights_hash", "0123456789abcdef"), HasSubstr("convert them anew"));
  EXPECT_THAT(why_with("scalars_hash", "0123456789abcdef"), HasSubstr("of another conversion"));
  EXPECT_THAT(why_with("calibration", 3), HasSubstr("expected an object"));
  EXPECT_THAT(why_with("seed", -1), HasSubstr("'seed' is -1"));
  EXPECT_THAT(why_with(json::array()), HasSubstr("expected an object"));
  for (const auto& [key, value] : json_.items()) {
    json without = json_;
    without.erase(key);
    EXPECT_THAT(why_with(without), HasSubstr("'" + key + "' is missing"));
  }
  EXPECT_EQ(why_with(json_), "");
}

TEST_F(SideFile, TruncatedOrSpoiltScalarsAreRefused) {
  const fs::path path = conversion_.out / "tpla.safetensors";
  const auto reload_with = [&](const std::vector<TplaLayer>& layers) {
    TplaSideFile other = written_;
    other.layers = layers;
    write_tpla_side_file(conversion_.out, other);
    return message_of([&] { load(); });
  };
  std::vector<TplaLayer> layers = written_.layers;
  layers[1].kappa[2] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(reload_with(layers), HasSubstr("'layers.1.kappa' has nan at 2"));
  layers = written_.layers;
  layers[0].rms_scale[0] = 0;
  EXPECT_THAT(reload_with(layers), HasSubstr("'layers.0.rms_scale' has 0"));
  layers = written_.layers;
  layers[0].moments.pop_back();
  EXPECT_THAT(reload_with(layers), HasSubstr("'layers.0.moments' is F64 [15]: expected F64 [16]"));
  EXPECT_EQ(reload_with(written_.layers), "");
  fs::resize_file(path, 40);
  EXPECT_THAT(message_of([&] { load(); }), HasSubstr("tpla.safetensors"));
}

TEST_F(SideFile, WeightsThatWereTrainedOnAreRefused) {
  const ModelWeights weights = testing::small_weights(config_, DType::f32, 8);
  fs::remove(conversion_.out / "model.safetensors");
  write_checkpoint(conversion_.out, model_tensor_sources(weights, DType::f32), 1 << 30);
  EXPECT_THAT(message_of([&] { load(); }), HasSubstr("convert them anew"));
}

}  // namespace
}  // namespace isomer
