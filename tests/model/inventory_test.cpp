#include "model/inventory.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/builtin_models.h"
#include "model/json_text.h"
#include "model/temp_folder.h"
#include "model/weights.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// A whole model of zeros in a folder, to be damaged by the tests.
class WholeModel : public testing::Test {
 protected:
  void SetUp() override {
    for (const auto& model : builtin_models())
      if (model.name == "tiny-mla") folder_.write("config.json", model.config_json);
    for_each_expected_tensor(config_, [&](const std::string& name, const Shape& shape, bool optional) {
      if (!optional) shapes_[name] = shape;
    });
  }
  Inventory take() {
    std::vector<TensorSource> sources;
    for (const auto& [name, shape] : shapes_) {
      sources.push_back({name, DType::bf16, shape, [shape = shape] {
                           Tensor zeros = Tensor::unrecorded("zeros", DType::bf16, shape);
                           std::fill_n(zeros.data<bf16>(), zeros.numel(), bf16());
                           return zeros;
                         }});
    }
    write_safetensors(folder_.path() / "model.safetensors", sources);
    return take_inventory(Checkpoint::open(folder_.path()), config_);
  }
  /// Exit status of isomer inspect, what it prints in printed_.
  int run_inspect(const std::string& arguments) {
    const auto output = folder_.path() / "output.txt";
    const auto command = fmt::format("{}/isomer inspect {} > {} 2>&1", ISOMER_BINARY_DIR, arguments, output.string());
    const int status = std::system(command.c_str());
    printed_ = read_text_file(output, 1 << 20);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  ModelConfig config_ = load_model_config("tiny-mla");
  std::map<std::string, Shape> shapes_;
  TempFolder folder_;
  std::string printed_;
};

TEST_F(WholeModel, IsComplete) {
  const auto inventory = take();
  EXPECT_THAT(inventory.problems, IsEmpty());
  EXPECT_THAT(inventory.notes, IsEmpty());
  EXPECT_EQ(inventory.num_parameters, num_parameters(config_));
  const auto json_path = (folder_.path() / "out.json").string();
  EXPECT_EQ(run_inspect(fmt::format("{} --json {}", folder_.path().string(), json_path)), 0) << printed_;
  EXPECT_THAT(printed_, HasSubstr("model.layers.*.mlp.experts.*.down_proj.weight           16  BF16"));
  const auto written = parse_json(read_text_file(json_path, 1 << 20), json_path);
  EXPECT_EQ(written["config"]["cache_elements_per_token"], 240);
  EXPECT_EQ(written["num_parameters"], num_parameters(config_));
  EXPECT_EQ(written["schema_version"], 1);
  EXPECT_TRUE(written["problems"].empty());
}

TEST_F(WholeModel, DamageIsNamed) {
  shapes_.erase("model.layers.0.self_attn.kv_a_layernorm.weight");
  shapes_.erase("model.layers.2.self_attn.kv_a_layernorm.weight");
  shapes_["model.layers.1.self_attn.o_proj.weight"] = {256, 511};
  shapes_["model.layers.1.self_attn.surprise.weight"] = {1};
  shapes_["model.layers.3.self_attn.o_proj.weight"] = {1};  // beyond num_hidden_layers
  const auto inventory = take();
  EXPECT_THAT(
      inventory.problems,
      ElementsAre(HasSubstr("missing: model.layers.*.self_attn.kv_a_layernorm.weight (2 tensors, first model.layers.0"),
                  HasSubstr("not part of this model: model.layers.1.self_attn.surprise.weight"),
                  HasSubstr("shape [256, 511] where the configuration makes it [256, 512]: model.layers.1")));
  EXPECT_THAT(inventory.problems[0], HasSubstr("\"kv_a_layernorm\": false"));
  EXPECT_THAT(inventory.notes, ElementsAre(HasSubstr("multi-token-prediction layer 3")));
  EXPECT_EQ(run_inspect(folder_.path().string()), 1);
  EXPECT_THAT(printed_, HasSubstr("3 faults."));
}

TEST_F(WholeModel, WithoutConfigurationIsOnlyListed) {
  take();
  fs::remove(folder_.path() / "config.json");
  EXPECT_EQ(run_inspect((folder_.path() / "model.safetensors").string()), 0);
  EXPECT_THAT(printed_, HasSubstr("no config.json"));
}

TEST_F(WholeModel, MalformedFilesEndWithAnError) {
  folder_.write("model.safetensors", "not a checkpoint");
  EXPECT_EQ(run_inspect(folder_.path().string()), 2);
  EXPECT_THAT(printed_, HasSubstr("model.safetensors: at byte 0: header length"));
  EXPECT_EQ(run_inspect("/nowhere"), 2);
}

TEST(Inventory, CountsWhatTheFormulaCounts) {
  for (const auto& name : builtin_model_names()) {
    const auto config = load_model_config(name);
    std::int64_t total = 0;
    for_each_expected_tensor(config, [&](const std::string&, const Shape& shape, bool optional) {
      total += optional ? 0 : num_elements(shape);
    });
    EXPECT_EQ(total, num_parameters(config)) << name;
  }
}

TEST(Inventory, PatternsReplaceNumbersBetweenDots) {
  EXPECT_EQ(pattern_of("model.layers.12.mlp.experts.3.up_proj.weight"), "model.layers.*.mlp.experts.*.up_proj.weight");
  EXPECT_EQ(pattern_of("a1.2b..3"), "a1.2b..*");
  EXPECT_EQ(pattern_of("a."), "a.");
  EXPECT_EQ(pattern_of(""), "");
}

}  // namespace
}  // namespace isomer
