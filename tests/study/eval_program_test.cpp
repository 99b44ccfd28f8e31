// isomer eval, as a user runs it.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "model/safetensors.h"
#include "model/text.h"
#include "study/program.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

/// A seeded model with a tokenizer of its own, and two texts.
class EvalProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string novel(default_text());
    folder_.write("train.txt", novel.substr(0, 60000));
    folder_.write("held-out.txt", "<|endoftext|>\n" + novel.substr(100000, 3000) + "\n<|endoftext|>\nThe end, née.\n");
    const auto made = run_isomer(
        fmt::format("tokenizer train --data {0}/train.txt --vocab-size 512 --out {0}/model", folder_.path().string()));
    ASSERT_EQ(made.exit_code, 0) << made.err;
    nlohmann::json config = nlohmann::json::parse(load_model_config_text("tiny-mla"));
    config["vocab_size"] = 512;
    config["max_position_embeddings"] = 256;
    folder_.write("model/config.json", config.dump());
    const ModelConfig parsed = load_model_config((folder_.path() / "model").string());
    write_checkpoint(folder_.path() / "model",
                     model_tensor_sources(initial_model_weights(parsed, 1, DType::f32), DType::bf16), 1 << 30);
  }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  void expect_refused(const std::string& arguments, const std::vector<std::string>& parts) const {
    const auto result = run_isomer("eval " + arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    for (const std::string& part : parts) EXPECT_THAT(result.err, HasSubstr(part)) << arguments;
  }
  TempFolder folder_;
};

TEST_F(EvalProgram, PerplexityOfACheckpoint) {
  const auto one = run_isomer(fmt::format("eval perplexity --model {} --data {} --window 64 --overlap 16 --json {}",
                                          at("model"), at("held-out.txt"), at("one.json")));
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, HasSubstr("windows of 64 tokens, 16 of them context"));
  EXPECT_THAT(one.out, HasSubstr("prefill"));
  const auto json = nlohmann::json::parse(text_of(folder_.path() / "one.json"));
  EXPECT_EQ(json["bytes_scored"], 3001 + 15);  // the lines before the separators end in a newline
  // Untrained: close to a uniform guess.
  EXPECT_NEAR(json["nats_per_token"].get<double>(), std::log(512.0), 0.2);
  EXPECT_NEAR(json["perplexity"].get<double>(), std::exp(json["nats_per_token"].get<double>()), 1e-6 * 512);

  const auto two =
      run_isomer(fmt::format("eval perplexity --model {} --data {} --window 64 --overlap 16 --layout laga:2 --json {}",
                             at("model"), at("held-out.txt"), at("two.json")));
  ASSERT_EQ(two.exit_code, 0) << two.err;
  const auto other = nlohmann::json::parse(text_of(folder_.path() / "two.json"));
  EXPECT_EQ(other["tokens_scored"], json["tokens_scored"]);
  EXPECT_NEAR(other["nats_per_token"].get<double>(), json["nats_per_token"].get<double>(), 1e-5);
}

TEST_F(EvalProgram, NgramsOfBytesAndTokens) {
  const auto result = run_isomer(fmt::format("eval ngram --train {} --data {} --tokenizer {} --json {}",
                                             at("train.txt"), at("held-out.txt"), at("model"), at("ngram.json")));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("5-gram of bytes"));
  EXPECT_THAT(result.out, HasSubstr("bigram of tokens"));
  const auto json = nlohmann::json::parse(text_of(folder_.path() / "ngram.json"));
  ASSERT_EQ(json["models"].size(), 2U);
  EXPECT_EQ(json["data_bytes"], 3001 + 15);
  for (const auto& model : json["models"]) {
    // English after 60 KB of it: between an excellent model's and unigram's.
    EXPECT_GT(model["bits_per_byte"].get<double>(), 1.8);
    EXPECT_LT(model["bits_per_byte"].get<double>(), 3.5);
  }
}

TEST_F(EvalProgram, RefusalsSayWhatToDo) {
  folder_.write("bad.txt", "fine\xff");
  folder_.write("empty.txt", "");
  const std::string model = fmt::format("perplexity --model {} ", at("model"));
  const std::string data = fmt::format("--data {} ", at("held-out.txt"));
  expect_refused(model + "--data " + at("bad.txt"), {"0xff at offset 4 is not UTF-8"});
  expect_refused(model + "--data " + at("empty.txt"), {"it is empty"});
  expect_refused(model + "--data " + at("none.txt"), {"none.txt"});
  expect_refused(model + data + "--window 257", {"--window 257", "max_position_embeddings 256"});
  expect_refused(model + data + "--window 64 --overlap 64", {"--overlap 64", "0 to 63"});
  expect_refused(model + data + "--layout laga:3", {"laga:3"});
  expect_refused("perplexity --model deepseek-v3 " + data, {"deepseek-v3", "has no weights"});
  std::filesystem::remove(folder_.path() / "model" / "tokenizer.json");
  expect_refused(model + data, {"no tokenizer.json", "--tokenizer"});
  expect_refused(fmt::format("ngram --train {} {}", at("empty.txt"), data), {"it is empty"});
  expect_refused(fmt::format("ngram --train {} {} --order 9", at("train.txt"), data), {"--order"});
  expect_refused("", {"subcommand"});
}

}  // namespace
}  // namespace isomer
