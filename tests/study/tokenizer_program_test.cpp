// isomer tokenizer, as a user runs it.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "model/tokenizer_trainer.h"
#include "study/program.h"
#include "train/token_file.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

const std::string kNovel = std::string(ISOMER_SOURCE_DIR) + "/data/text/pride-and-prejudice.txt";

TEST(TokenizerProgram, TrainsEncodesDecodes) {
  const TempFolder folder;
  const std::string at = folder.path().string();
  const auto train = run_isomer(
      fmt::format("tokenizer train --data {} --vocab-size 1K --out {}/tok --json {}/train.json", kNovel, at, at));
  EXPECT_EQ(train.exit_code, 0) << train.err;
  EXPECT_THAT(train.out, HasSubstr("0 <|endoftext|>"));
  const auto json = nlohmann::json::parse(text_of(folder.path() / "train.json"));
  EXPECT_EQ(json["command"], "tokenizer train");
  EXPECT_EQ(json["vocab_size"], 1024);
  EXPECT_GT(json["bytes_per_token"].get<double>(), 2.5);

  const std::string text = "It is a truth universally acknowledged, é😀\n\n";
  folder.write("a.txt", text);
  const auto encoded = run_isomer(fmt::format("tokenizer encode --tokenizer {}/tok --data {}/a.txt", at, at));
  EXPECT_EQ(encoded.exit_code, 0) << encoded.err;
  folder.write("ids", encoded.out);
  const auto decoded = run_isomer(fmt::format("tokenizer decode --tokenizer {}/tok --ids {}/ids", at, at));
  EXPECT_EQ(decoded.exit_code, 0) << decoded.err;
  EXPECT_EQ(decoded.out, text);

  const auto filed = run_isomer(
      fmt::format("tokenizer encode --tokenizer {}/tok --data {}/a.txt {} --out {}/a.tokens", at, at, kNovel, at));
  EXPECT_EQ(filed.exit_code, 0) << filed.err;
  const TokenDataset dataset = TokenDataset::open(folder.path() / "a.tokens");
  EXPECT_EQ(dataset.num_documents(), 2);
  EXPECT_EQ(dataset.tokenizer_hash(), Tokenizer::load(folder.path() / "tok").hash());

  const auto info = run_isomer(fmt::format("tokenizer info --tokenizer {}/tok", at));
  EXPECT_EQ(info.exit_code, 0) << info.err;
  EXPECT_THAT(info.out, HasSubstr("the same text"));
}

TEST(TokenizerProgram, RefusalsSayWhatToDo) {
  const TempFolder folder;
  const std::string at = folder.path().string();
  folder.write("bad.txt", "fine\xff");
  folder.write("tokenizer.json", "{}");
  const auto expect = [](const std::string& arguments, const std::string& message) {
    const auto result = run_isomer(fmt::format("tokenizer {}", arguments));
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.err, HasSubstr(message)) << arguments;
  };
  expect(fmt::format("train --data {}/bad.txt --vocab-size 300 --out {}/tok", at, at), "0xff at offset 4 is not UTF-8");
  expect(fmt::format("train --data {}/none.txt --vocab-size 300 --out {}/tok", at, at), "none.txt");
  expect(fmt::format("train --data {} --vocab-size 20 --out {}/tok", kNovel, at), "--vocab-size");
  expect(fmt::format("train --data {} --vocab-size 1M --out {}/tok", kNovel, at), "ask for fewer");
  expect(fmt::format("info --tokenizer {}", at), "no 'model' in it");
  expect(fmt::format("info --tokenizer {}/absent", at), "absent");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "tok"));
}

}  // namespace
}  // namespace isomer
