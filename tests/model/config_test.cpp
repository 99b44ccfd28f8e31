#include "model/config.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/builtin_models.h"
#include "model/json_text.h"

namespace isomer {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json builtin_json(std::string_view name) {
  for (const auto& model : builtin_models())
    if (model.name == name) return parse_json(model.config_json, name);
  throw std::logic_error("no such built-in model");
}

struct Expected {
  const char* name;
  std::int64_t parameters;
  std::int64_t cache_elements;
  double scale;
};

// Parameters: the totals of the published checkpoints (the sums of their safetensors headers), without the
// multi-token-prediction layer; MiniCPM3's by hand from its shapes.
class PublishedSizes : public testing::TestWithParam<Expected> {};

TEST_P(PublishedSizes, AreReproduced) {
  const auto& expected = GetParam();
  const auto config = load_model_config(expected.name);
  EXPECT_EQ(config.name, expected.name);
  EXPECT_EQ(num_parameters(config), expected.parameters);
  EXPECT_EQ(cache_elements_per_token(config), expected.cache_elements);
  EXPECT_NEAR(softmax_scale(config), expected.scale, 5e-7);
}

INSTANTIATE_TEST_SUITE_P(Models, PublishedSizes,
                         testing::Values(Expected{"deepseek-r1", 671026419200, 35136, 0.135234},
                                         Expected{"deepseek-v3", 671026419200, 35136, 0.135234},
                                         Expected{"deepseek-v2", 235741434880, 34560, 0.114721},
                                         Expected{"deepseek-v2-lite", 15706484224, 15552, 0.114721},
                                         Expected{"kimi-k2", 1026408232448, 35136, 0.130861},
                                         Expected{"minicpm3", 4073875968, 17856, 0.102062},
                                         Expected{"llama-3.1-405b", 405853388800, 258048, 0.088388},
                                         Expected{"smollm2-135m", 134515008, 11520, 0.125}),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           for (char& c : name)
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           return name;
                         });

TEST(ModelConfig, ReadsEveryBuiltin) {
  const auto names = builtin_model_names();
  EXPECT_EQ(names.size(), 10u);
  for (const auto& name : names) EXPECT_NO_THROW(load_model_config(name)) << name;
}

TEST(ModelConfig, TinyModelFitsSixMegabytes) {
  const auto config = load_model_config("tiny-mla");
  EXPECT_LE(2 * num_parameters(config), 6'000'000);
  EXPECT_FALSE(config.is_moe_layer(0));
  EXPECT_TRUE(config.is_moe_layer(1));
}

TEST(ModelConfig, KnowsTheKinds) {
  const auto v2 = load_model_config("deepseek-v2");
  EXPECT_EQ(v2.moe.router, RouterKind::softmax_group_limited);
  EXPECT_TRUE(v2.rope.interleave);
  EXPECT_EQ(load_model_config("deepseek-v2-lite").q_lora_rank, 0);
  const auto glm = load_model_config("glm-5");
  EXPECT_EQ(glm.v_head_dim, 256);
  EXPECT_EQ(glm.rope.theta, 1e6);
  EXPECT_EQ(glm.rope.scaling, RopeScalingKind::none);
  const auto minicpm = load_model_config("minicpm3");
  EXPECT_FALSE(minicpm.rope.interleave);
  EXPECT_EQ(minicpm.rope.scaling, RopeScalingKind::longrope);
  EXPECT_EQ(minicpm.rope.long_factor.size(), 16u);
  EXPECT_EQ(minicpm.v_head_dim, 64);
  EXPECT_EQ(minicpm.scale_emb, 12);
  const auto llama = load_model_config("llama-3.1-405b");
  EXPECT_EQ(llama.attention, AttentionKind::gqa);
  EXPECT_EQ(llama.rope.scaling, RopeScalingKind::llama3);
  EXPECT_EQ(llama.head_dim, 128);
}

TEST(ModelConfig, RopeParametersSayTheSameAsRopeScaling) {
  auto file = builtin_json("deepseek-v3");
  auto parameters = file["rope_scaling"];
  parameters["rope_type"] = parameters["type"];
  parameters.erase("type");
  parameters["rope_theta"] = 12345;
  file["rope_parameters"] = parameters;
  file.erase("rope_scaling");
  file.erase("rope_theta");
  const auto config = parse_model_config(file, "m");
  EXPECT_EQ(config.rope.theta, 12345);
  EXPECT_EQ(config.rope.scaling, RopeScalingKind::yarn);
  EXPECT_EQ(config.rope.factor, 40);
}

TEST(ModelConfig, LayerListStandsForTheNumberOfDenseLayers) {
  auto file = builtin_json("tiny-mla");
  file.erase("first_k_dense_replace");
  file["mlp_layer_types"] = {"dense", "dense", "sparse"};
  EXPECT_EQ(parse_model_config(file, "m").moe.first_k_dense_replace, 2);
}

TEST(ModelConfig, Qwen2HasBiasesOnQKV) {
  auto file = builtin_json("smollm2-135m");
  const auto before = num_attention_parameters(parse_model_config(file, "m"));
  file["model_type"] = "qwen2";
  EXPECT_EQ(num_attention_parameters(parse_model_config(file, "m")), before + 576 + 2 * 192);
}

TEST(ModelConfig, NopeKeepsTheRopePartAndDoesNotRotate) {
  auto file = builtin_json("tiny-mla");
  file["mla_use_nope"] = true;
  EXPECT_FALSE(parse_model_config(file, "m").rope.rotate);
}

struct Fault {
  const char* model;
  const char* patch;  // RFC 7386: null removes
  const char* complaint;
};

class FaultyConfig : public testing::TestWithParam<Fault> {};

TEST_P(FaultyConfig, IsRefusedByKeyAndValue) {
  auto file = builtin_json(GetParam().model);
  file.merge_patch(json::parse(GetParam().patch));
  try {
    parse_model_config(file, "m");
    FAIL() << "accepted: " << GetParam().patch;
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(GetParam().complaint));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, FaultyConfig,
    testing::Values(
        Fault{"deepseek-v3", R"({"hidden_size": null})", "m: hidden_size is missing"},
        Fault{"deepseek-v3", R"({"hidden_size": "7168"})", "hidden_size = \"7168\": expected an integer from 1"},
        Fault{"deepseek-v3", R"({"hidden_size": -1})", "hidden_size = -1: expected an integer from 1"},
        Fault{"deepseek-v3", R"({"hidden_size": 1e3})", "hidden_size = 1000.0: expected an integer"},
        Fault{"deepseek-v3", R"({"hidden_size": 18446744073709551615})",
              "hidden_size = 18446744073709551615: expected"},
        Fault{"deepseek-v3", R"({"hidden_size": [1]})", "hidden_size = an array of 1: expected"},
        Fault{"deepseek-v3", R"({"vocab_size": 0})", "vocab_size = 0"},
        Fault{"deepseek-v3", R"({"model_type": "gpt2"})", "model_type = \"gpt2\": expected one of deepseek_v2"},
        Fault{"deepseek-v3", R"({"model_type": 3})", "model_type = 3: expected a string"},
        Fault{"deepseek-v3", R"({"qk_rope_head_dim": 63})", "qk_rope_head_dim = 63: expected an even number"},
        Fault{"deepseek-v3", R"({"v_head_dim": null})", "v_head_dim is missing"},
        Fault{"deepseek-v3", R"({"kv_lora_rank": true})", "kv_lora_rank = true: expected an integer"},
        Fault{"deepseek-v3", R"({"n_group": 7})", "n_group = 7: expected a divisor of n_routed_experts, 256"},
        Fault{"deepseek-v3", R"({"topk_group": 9})", "topk_group = 9: expected at most n_group, 8"},
        Fault{"deepseek-v3", R"({"n_group": 256, "topk_group": 8})", "expected groups of two experts"},
        Fault{"deepseek-v3", R"({"num_experts_per_tok": 257})", "num_experts_per_tok = 257"},
        Fault{"deepseek-v3", R"({"num_experts_per_tok": 129})", "at most the 128 experts"},
        Fault{"deepseek-v3", R"({"scoring_func": "softmax"})", "scoring_func = \"softmax\": expected sigmoid"},
        Fault{"deepseek-v3", R"({"topk_method": "random"})", "topk_method = \"random\""},
        Fault{"deepseek-v3", R"({"moe_layer_freq": 2})", "moe_layer_freq = 2: expected 1"},
        Fault{"deepseek-v3", R"({"first_k_dense_replace": 62})", "first_k_dense_replace = 62"},
        Fault{"deepseek-v3", R"({"norm_topk_prob": 1})", "norm_topk_prob = 1: expected true or false"},
        Fault{"deepseek-v3", R"({"rms_norm_eps": 0})", "rms_norm_eps = 0"},
        Fault{"deepseek-v3", R"({"rope_theta": -5})", "rope_theta = -5"},
        Fault{"deepseek-v3", R"({"rope_scaling": "yarn"})", "rope_scaling: \"yarn\": expected an object"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"type": "ntk"}})", "type = \"ntk\": expected default, linear"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"type": null}})", "type is missing"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"factor": 0.5}})", "rope_scaling: factor = 0.5"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"beta_slow": 64}})", "beta_slow = 64: expected at most beta_fast"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"attention_factor": 1.5}})", "attention_factor = 1.5"},
        Fault{"deepseek-v3", R"({"rope_scaling": {"original_max_position_embeddings": null}})", "is missing"},
        Fault{"deepseek-v3", R"({"rope_parameters": {"rope_type": "default"}})", "the same as rope_parameters"},
        Fault{"deepseek-v3", R"({"mlp_layer_types": ["dense"]})",
              "mlp_layer_types = an array of 1: expected an array of 61"},
        Fault{"deepseek-v3", R"({"hidden_act": "gelu"})", "hidden_act = \"gelu\": expected silu"},
        Fault{"deepseek-v3",
              R"({"hidden_size": 16777216, "n_routed_experts": 65536, "moe_intermediate_size": 16777216})",
              "the sizes together make"},
        Fault{"minicpm3", R"({"rope_scaling": {"long_factor": [1, 2]}})",
              "long_factor = an array of 2: expected an array of 16"},
        Fault{"minicpm3", R"({"hidden_size": 2561})", "hidden_size = 2561: expected a multiple"},
        Fault{"llama-3.1-405b", R"({"num_key_value_heads": 7})", "num_key_value_heads = 7: expected a divisor"},
        Fault{"llama-3.1-405b", R"({"num_attention_heads": 24})", "hidden_size = 16384: expected a multiple"},
        Fault{"llama-3.1-405b", R"({"head_dim": 3})", "head_dim = 3: expected an even number"},
        Fault{"llama-3.1-405b", R"({"mlp_bias": true})", "mlp_bias = true"},
        Fault{"llama-3.1-405b", R"({"rope_scaling": {"high_freq_factor": 1}})",
              "high_freq_factor = 1: expected more"}));

TEST(ModelConfig, RefusesANumberInAListByIndex) {
  auto file = builtin_json("minicpm3");
  file["rope_scaling"]["short_factor"][3] = -1;
  try {
    parse_model_config(file, "m");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("short_factor[3] = -1"));
  }
}

TEST(ModelConfig, RefusesNaN) {
  auto file = builtin_json("deepseek-v3");
  file["rope_theta"] = std::nan("");
  EXPECT_THROW(parse_model_config(file, "m"), Error);
  EXPECT_THROW(parse_model_config(json::array(), "m"), Error);
}

TEST(LoadModelConfig, SuggestsNearNames) {
  try {
    load_model_config("deepseek_v3");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean deepseek-v3 or"));
    EXPECT_THAT(error.what(), HasSubstr("kimi-k2"));
  }
  try {
    load_model_config("something-else-entirely");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), testing::Not(HasSubstr("did you mean")));
  }
}

TEST(LoadModelConfig, ReadsDirectoriesAndFiles) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("isomer-config-{}", ::getpid());
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << builtin_json("tiny-mla").dump();
  EXPECT_EQ(load_model_config(folder.string()).kv_lora_rank, 64);
  EXPECT_EQ(load_model_config(folder.string()).name, folder.filename().string());
  EXPECT_EQ(load_model_config((folder / "config.json").string()).name, folder.filename().string());
  std::filesystem::remove(folder / "config.json");
  EXPECT_THROW(load_model_config(folder.string()), Error);
  std::filesystem::remove_all(folder);
}

struct BadText {
  std::string text;
  const char* complaint;
};

TEST(ParseJson, RefusesWithTheOffset) {
  const std::string deep(100000, '[');
  std::string deep_objects;
  for (int i = 0; i < 1000; ++i) deep_objects += "{\"a\":";
  for (const auto& [text, complaint] : {
           BadText{"{\"a\": 1, \"a\": 2}", "duplicate key \"a\""},
           BadText{deep, "nested more than 64 deep"},
           BadText{deep_objects, "nested more than 64 deep"},
           BadText{"{\"a\": NaN}", "f.json: at byte 7"},
           BadText{"{\"a\": 1e999}", "f.json"},
           BadText{"{\"a\xff\": 1}", "f.json: at byte 4"},
           BadText{"", "f.json: at byte 0"},
           BadText{"{} x", "f.json: at byte 4"},
           BadText{std::string("{\"a\": \0}", 8), "f.json: at byte 7"},
       }) {
    try {
      parse_json(text, "f.json");
      ADD_FAILURE() << "accepted: " << text.substr(0, 40);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(complaint));
    }
  }
}

}  // namespace
}  // namespace isomer
