// Weights and tokens of a comparison: seeded, of a checkpoint, of what ships.
#include "study/weights_source.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "model/checkpoint.h"
#include "model/model_weights.h"
#include "model/safetensors.h"
#include "model/text.h"
#include "model/tokenizer.h"
#include "model/tokenizer_trainer.h"
#include "study/program.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;

class ModelFolder : public ::testing::Test {
 protected:
  static constexpr const char* kModel = "bin/models/tiny-mla";

  void SetUp() override {
    std::filesystem::create_directories(place());
    nlohmann::json config = nlohmann::json::parse(load_model_config_text("tiny-mla"));
    config["vocab_size"] = 512;
    folder_.write(std::string(kModel) + "/config.json", config.dump());
    config_ = load_model_config(place().string());
    write_checkpoint(place(), model_tensor_sources(initial_model_weights(config_, 9, DType::f32), DType::f32), 1 << 30);
  }
  void add_tokenizer(std::int64_t vocab_size) {
    TokenizerTrainer trainer({.vocab_size = vocab_size});
    trainer.add_text(std::string(default_text().substr(0, 20000)));
    tokenizer_ = std::make_unique<Tokenizer>(trainer.train());
    save_tokenizer(place(), *tokenizer_, trainer.config_json());
  }
  std::filesystem::path place() const { return folder_.path() / kModel; }
  WeightsSource source() const { return open_weights(place().string(), config_, 0); }

  TempFolder folder_;
  ModelConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(ModelFolder, WithoutATokenizerBytesAreTokens) {
  EXPECT_EQ(source().tokenizer, nullptr);
  bool wrapped = false;
  EXPECT_EQ(text_tokens(source(), "ab", 3, &wrapped), (std::vector<std::int64_t>{'a', 'b', 'a'}));
  EXPECT_TRUE(wrapped);
}

TEST_F(ModelFolder, TokensOfTheTokenizerBesideTheCheckpoint) {
  add_tokenizer(400);
  const std::string text(default_text().substr(5000, 4000));
  const std::vector<std::int32_t> ids = tokenizer_->encode(text);
  const std::vector<std::int64_t> expected(ids.begin(), ids.end());
  bool wrapped = true;
  const auto first = text_tokens(source(), text, 100, &wrapped);
  EXPECT_EQ(first, std::vector<std::int64_t>(expected.begin(), expected.begin() + 100));
  EXPECT_FALSE(wrapped);
  auto twice = expected;
  twice.insert(twice.end(), expected.begin(), expected.end());
  EXPECT_EQ(text_tokens(source(), text, twice.size(), &wrapped), twice);
  EXPECT_TRUE(wrapped);
  EXPECT_TRUE(text_tokens(source(), text, 0, &wrapped).empty());
  EXPECT_EQ(text_tokens(source(), "a\xff", 5).size(), 5U);
  EXPECT_THROW(text_tokens(source(), "", 1), std::invalid_argument);
}

TEST_F(ModelFolder, TheBlockReadsTheRowsOfTheseTokens) {
  add_tokenizer(400);
  const std::string text = "It is a truth universally acknowledged, that a single man in possession of a fortune";
  const BlockProblem problem{.config = config_, .seq = 4, .batch = 2};
  const BlockData data = load_block_data(problem, source(), text, 1, false);
  const Tensor rows = source().checkpoint->read("model.embed_tokens.weight", DType::f32);
  const std::vector<std::int32_t> ids = tokenizer_->encode(text);
  for (std::int64_t s = 0; s < 4; ++s) {
    for (std::int64_t b = 0; b < 2; ++b) {
      const std::int64_t id = ids.at(static_cast<std::size_t>(b * 4 + s));
      for (std::int64_t i = 0; i < config_.hidden_size; ++i) {
        ASSERT_EQ(data.x.data<float>()[(s * 2 + b) * config_.hidden_size + i],
                  rows.data<float>()[id * config_.hidden_size + i]);
      }
    }
  }
}

TEST_F(ModelFolder, RefusesATokenizerOfAnotherModel) {
  add_tokenizer(513);
  try {
    source();
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("513 tokens, the model's vocab_size is 512"));
  }
}

TEST_F(ModelFolder, BesideTheExecutableItIsWhatShips) {
  add_tokenizer(400);
  const auto program = folder_.path() / "bin" / "isomer";
  std::filesystem::copy_file(std::string(ISOMER_BINARY_DIR) + "/isomer", program);
  const auto run = [&](const std::string& arguments) {
    return testing::run_shell(program.string() + " compare --seq 16 --ranks 2 --schemes laga " + arguments);
  };
  const auto shipped = run("");
  EXPECT_EQ(shipped.exit_code, 0) << shipped.err;
  EXPECT_THAT(shipped.out, HasSubstr("weights layer 0 of tiny-mla, which ships; tokens the tokens of the novel"));
  std::filesystem::remove_all(place());
  if (std::filesystem::exists(std::string(ISOMER_SOURCE_DIR) + "/models/tiny-mla/model.safetensors")) return;
  const auto seeded = run("");
  EXPECT_EQ(seeded.exit_code, 0) << seeded.err;
  EXPECT_THAT(seeded.out, HasSubstr("weights seeded; tokens the bytes of the novel"));
}

}  // namespace
}  // namespace isomer
