// isomer generate and isomer eval logits, as a user runs them.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/text.h"
#include "study/program.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

/// A seeded model with a tokenizer of its own.
class GenerateProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("train.txt", std::string(default_text()).substr(0, 40000));
    const auto made = run_isomer(
        fmt::format("tokenizer train --data {0}/train.txt --vocab-size 400 --out {0}/model", folder_.path().string()));
    ASSERT_EQ(made.exit_code, 0) << made.err;
    nlohmann::json config = nlohmann::json::parse(load_model_config_text("tiny-mla"));
    config["vocab_size"] = 400;
    config["max_position_embeddings"] = 128;
    folder_.write("model/config.json", config.dump());
    const ModelConfig parsed = load_model_config(at("model"));
    write_checkpoint(folder_.path() / "model",
                     model_tensor_sources(initial_model_weights(parsed, 1, DType::f32, 0.2), DType::bf16), 1 << 30);
  }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  nlohmann::json generated(const std::string& options) const {
    const auto result =
        run_isomer(fmt::format("generate --model {} --ignore-eos --json {} {}", at("model"), at("out.json"), options));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(text_of(folder_.path() / "out.json"));
  }
  void expect_refused(const std::string& arguments, const std::string& part) const {
    const auto result = run_isomer(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.err, HasSubstr(part)) << arguments;
  }
  TempFolder folder_;
};

TEST_F(GenerateProgram, WritesTheTextAndTheSameUnderEveryLayout) {
  const auto one =
      run_isomer(fmt::format("generate --model {} --prompt 'It is a truth' --tokens 20 --greedy "
                             "--ignore-eos --json {}",
                             at("model"), at("one.json")));
  ASSERT_EQ(one.exit_code, 0) << one.err;
  const auto json = nlohmann::json::parse(text_of(folder_.path() / "one.json"));
  EXPECT_EQ(one.out, "It is a truth" + json["text"].get<std::string>() + "\n");
  EXPECT_EQ(json["token_ids"].size(), 20u);
  EXPECT_THAT(one.err, HasSubstr("19 decoded at"));
  for (const char* layout : {"tp:2", "kvp:4"}) {
    const auto other = generated(fmt::format("--prompt 'It is a truth' --tokens 20 --layout {}", layout));
    EXPECT_EQ(other["token_ids"], json["token_ids"]) << layout;
    EXPECT_GT(other["bytes_sent_rank_0"], 0) << layout;
  }
  EXPECT_NE(generated("--prompt 'It is a truth' --tokens 20 --temperature 1 --seed 3")["token_ids"], json["token_ids"]);
}

TEST_F(GenerateProgram, RefusesWithAReason) {
  const std::string generate = "generate --model " + at("model") + " ";
  expect_refused(generate + "--prompt ''", "--prompt is empty");
  expect_refused(generate + "--prompt \"$(printf 'caf\\351 ')\"", "--prompt is not UTF-8: byte 3");
  expect_refused(generate + "--prompt It --tokens 500", "go beyond the 128 positions");
  expect_refused(generate + "--prompt It --tokens 100 --cache-tokens 64", "the cache is too small");
  expect_refused(generate + "--prompt It --layout tp:3", "16 heads can't be spread over 3 ranks");
  expect_refused(generate + "--prompt It --layout laga:2", "there are: tp, kvp");
  expect_refused(generate + "--prompt It --greedy --temperature 1", "--greedy with --temperature 1");
  expect_refused("generate --prompt It --model deepseek-v3", "a built-in description has no weights");
}

TEST_F(GenerateProgram, LogitsOfIdsByPrefillAndByDecode) {
  folder_.write("ids.txt", "3 17\n251\t9 0 399 44 3 3 12");
  const std::string eval = fmt::format("eval logits --model {} --ids {} ", at("model"), at("ids.txt"));
  const auto read = [&](const std::string& options) {
    const auto result = run_isomer(eval + "--out " + at("logits.safetensors") + " " + options);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Checkpoint::open(at("logits.safetensors")).read("logits", DType::f32);
  };
  const Tensor whole = read("");
  EXPECT_EQ(whole.shape(), (Shape{10, 400}));
  const auto expected = testing::values_of(whole);
  // Float32 in two forms and two layouts.
  EXPECT_LT(testing::max_relative_difference(testing::values_of(read("--mode decode --layout kvp:2")), expected), 1e-4);
  EXPECT_LT(
      testing::max_relative_difference(testing::values_of(read("--mode decode --prefix 6 --layout tp:2")), expected),
      1e-4);
  folder_.write("ids.txt", "3 400");
  expect_refused(eval + "--out x", "word 2 is '400', not a token id from 0 to 399");
  folder_.write("ids.txt", "3 4x");
  expect_refused(eval + "--out x", "word 2 is '4x'");
  folder_.write("ids.txt", " \n");
  expect_refused(eval + "--out x", "no token ids");
}

}  // namespace
}  // namespace isomer
