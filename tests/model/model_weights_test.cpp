// A whole model's weights: the slots are those of the inventory, files come back as they were written.
#include "model/model_weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "model/checkpoint.h"
#include "model/inventory.h"
#include "model/temp_folder.h"

namespace isomer {
namespace {

using ShapesByName = std::map<std::string, Shape>;

ShapesByName shapes_of(const ModelWeights& weights) {
  ShapesByName shapes;
  weights.for_each([&](const std::string& name, const Tensor& tensor) {
    EXPECT_TRUE(shapes.emplace(name, tensor.shape()).second) << name;
  });
  return shapes;
}

class EveryModel : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryModel, HasTheTensorsOfTheInventory) {
  ModelConfig config = load_model_config(GetParam());
  config.num_hidden_layers = std::min<std::int64_t>(config.num_hidden_layers, 4);
  ShapesByName expected;
  for_each_expected_tensor(config, [&](const std::string& name, const Shape& shape, bool optional) {
    if (!optional || (config.attention_bias && !(config.model_type == "qwen2" && name.ends_with("o_proj.bias"))))
      expected[name] = shape;
  });
  EXPECT_EQ(shapes_of(initial_model_weights(config, 1, DType::bf16, 0.02, true)), expected);
}

INSTANTIATE_TEST_SUITE_P(Builtin, EveryModel, ::testing::ValuesIn(builtin_model_names()), [](const auto& instance) {
  std::string name = instance.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
});

TEST(ModelWeights, ComeBackFromAFileAsTheyWere) {
  const ModelConfig config = load_model_config("tiny-mla");
  const ModelWeights weights = initial_model_weights(config, 5, DType::bf16);
  const TempFolder folder;
  write_checkpoint(folder.path() / "m", model_tensor_sources(weights, DType::bf16), std::int64_t{1} << 30);
  const Checkpoint checkpoint = Checkpoint::open(folder.path() / "m");
  EXPECT_TRUE(take_inventory(checkpoint, config).problems.empty());
  std::map<std::string, Tensor> loaded;
  load_model_weights(checkpoint, config, DType::bf16).for_each([&](const std::string& name, const Tensor& t) {
    loaded[name] = t;
  });
  weights.for_each([&](const std::string& name, const Tensor& t) {
    ASSERT_TRUE(loaded.contains(name)) << name;
    ASSERT_EQ(loaded[name].nbytes(), t.nbytes()) << name;
    EXPECT_EQ(std::memcmp(loaded[name].raw(), t.raw(), static_cast<std::size_t>(t.nbytes())), 0) << name;
  });
}

TEST(ModelWeights, MissingTensorIsNamed) {
  const ModelConfig config = load_model_config("tiny-mla");
  auto sources = model_tensor_sources(initial_model_weights(config, 5, DType::bf16), DType::bf16);
  std::erase_if(sources, [](const TensorSource& s) { return s.name == "model.layers.1.mlp.gate.weight"; });
  const TempFolder folder;
  write_checkpoint(folder.path() / "m", sources, std::int64_t{1} << 30);
  const Checkpoint checkpoint = Checkpoint::open(folder.path() / "m");
  try {
    load_model_weights(checkpoint, config, DType::f32);
    FAIL() << "loaded without a router";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("model.layers.1.mlp.gate.weight"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace isomer
