// isomer generate and isomer eval logits, as a user runs them.
#include <gmock/gmock.h>

#include "infer/model_folder.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

class GenerateProgram : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return folder_.at(name); }
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
  const testing::ModelFolder folder_;
};

TEST_F(GenerateProgram, WritesTheTextAndTheSameUnderEveryLayout) {
  const auto one =
      run_isomer(fmt::format("generate --model {} --prompt 'It is a truth' --tokens 20 --greedy "
                             "--ignore-eos --json {}",
                             at("model"), at("one.json")));
  ASSERT_EQ(one.exit_code, 0) << one.err;
  const auto json = nlohmann::json::parse(text_of(folder_.path() / "one.json"));
  EXPECT_EQ(one.out, "It is a truth" + json["sequences"][0]["text"].get<std::string>() + "\n");
  EXPECT_EQ(json["sequences"][0]["token_ids"].size(), 20u);
  EXPECT_THAT(one.err, HasSubstr("19 decoded at"));
  for (const char* layout : {"tp:2", "kvp:4"}) {
    const auto other = generated(fmt::format("--prompt 'It is a truth' --tokens 20 --layout {}", layout));
    EXPECT_EQ(other["sequences"][0]["token_ids"], json["sequences"][0]["token_ids"]) << layout;
    EXPECT_GT(other["bytes_sent_rank_0"], 0) << layout;
  }
  EXPECT_NE(generated("--prompt 'It is a truth' --tokens 20 --temperature 1 --seed 3")["sequences"][0]["token_ids"],
            json["sequences"][0]["token_ids"]);
}

TEST_F(GenerateProgram, PassesOverBlanksInALayout) {
  EXPECT_EQ(generated("--prompt It --tokens 3 --layout ' tp: 2 '")["layout"], "tp:2");
  EXPECT_EQ(generated("--prompt It --tokens 3 --cache-tokens 9")["layout"], "tp:1");
}

TEST_F(GenerateProgram, SeveralTextsAreThoseOfEachAlone) {
  const std::string options = "--tokens 10 --temperature 1 --top-p 0.9 ";
  const auto both = generated(options + "--seed 4 --prompt 'It is' --prompt 'a truth universally acknowledged'");
  ASSERT_EQ(both["sequences"].size(), 2u);
  const auto first = generated(options + "--seed 4 --prompt 'It is'");
  const auto second = generated(options + "--seed 5 --prompt 'a truth universally acknowledged'");
  EXPECT_EQ(both["sequences"][0], first["sequences"][0]);
  EXPECT_EQ(both["sequences"][1], second["sequences"][0]);
  EXPECT_EQ(both["decode_steps"], 9);
  const auto apart = generated(options +
                               "--seed 4 --prompt 'It is' --prompt 'a truth universally acknowledged' "
                               "--prefill-layout exact-latent:2 --layout kvp:2");
  EXPECT_EQ(apart["sequences"], both["sequences"]);
}

TEST_F(GenerateProgram, RefusesWithAReason) {
  const std::string generate = "generate --model " + at("model") + " ";
  expect_refused(generate + "--prompt ''", "--prompt is empty");
  expect_refused(generate + "--prompt \"$(printf 'caf\\351 ')\"", "--prompt is not UTF-8: byte 3");
  expect_refused(generate + "--prompt It --tokens 500", "go beyond the 400 positions");
  expect_refused(generate + "--prompt It --tokens 100 --cache-tokens 64", "--cache-tokens 64: the cache is too small");
  expect_refused(generate + "--prompt It --tokens 20 --cache-tokens 1", "--cache-tokens 1: the cache is too small");
  expect_refused(generate + "--prompt It --layout helx:kvp=2", "did you mean helix?");
  expect_refused(generate + "--prompt It --layout ''", "such as helix:kvp=2,tpa=1, got ''");
  expect_refused(generate + "--prompt It --layout tp:3", "--layout tp:3: 16 heads can't be spread over 3 ranks");
  expect_refused(generate + "--prompt It --layout laga:2", "there are: tp, ");
  expect_refused(generate + "--prompt It --prefill-layout exact-latent:5", "--prefill-layout exact-latent:5: ");
  expect_refused(generate + "--prompt It --layout tp:2 --ranks 4", "--ranks 4: the layout tp:2 has 2");
  expect_refused(generate + "--prompt It --prompt ''", "--prompt (number 2) is empty");
  expect_refused(generate + "--prompt It --greedy --temperature 1", "--greedy with --temperature 1");
  expect_refused(generate + "--prompt It --top-p 0.5", "--top-p 0.5: nothing is sampled at temperature 0");
  // What it says to give is enough.
  expect_refused(generate + "--prompt It --prompt truth --tokens 9 --cache-tokens 20", "give at least 128");
  EXPECT_EQ(run_isomer(generate + "--prompt It --prompt truth --tokens 9 --cache-tokens 128").exit_code, 0);
  expect_refused("generate --prompt It --model deepseek-v3", "a built-in description has no weights");
}

// A converted checkpoint's prompt is read exactly, so its first token is that of the exact layouts; what follows is
// not.
TEST_F(GenerateProgram, ConvertedCheckpointsDecodeUnderTpla) {
  const auto made = run_isomer(
      fmt::format("convert tpla --model {0} --calibrate {1} --out {2} --shards 2 --calibration-tokens 1K --window 64",
                  at("model"), at("train.txt"), at("converted")));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  folder_.write("ids.txt", "3 17 251 9 0 399 44 3 3 12");
  const auto logits = [&](const std::string& options) {
    const auto result = run_isomer(fmt::format("eval logits --model {} --ids {} --mode decode --prefix 6 --out {} {}",
                                               at("converted"), at("ids.txt"), at("logits"), options));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return testing::values_of(Checkpoint::open(at("logits")).read("logits", DType::f32));
  };
  const auto exact = logits("--layout tp:2"), sharded = logits("--layout tpla:g=2");
  const auto part = [](const std::vector<double>& all, int first, int last) {
    return std::vector<double>(all.begin() + first * 400, all.begin() + last * 400);
  };
  EXPECT_LT(testing::max_relative_difference(part(sharded, 0, 6), part(exact, 0, 6)), 1e-4);
  EXPECT_GT(testing::max_relative_difference(part(sharded, 6, 10), part(exact, 6, 10)), 1e-3);
  const std::string generate = "generate --prompt It --tokens 5 --model ";
  // Without g it is the checkpoint's; what is not exact says so.
  const auto own = run_isomer(generate + at("converted") + " --layout tpla --json " + at("own.json"));
  EXPECT_EQ(own.exit_code, 0) << own.err;
  EXPECT_THAT(own.err, HasSubstr("NOT EXACT"));
  EXPECT_EQ(nlohmann::json::parse(text_of(folder_.path() / "own.json"))["exact"], false);
  const auto marked = Checkpoint::open(at("logits")).metadata();
  EXPECT_EQ(marked.at("exact"), "false");
  const auto text = run_isomer(generate + at("converted") + " --prefill-layout tp:1 --layout tpla:g=2,wo=scatter");
  EXPECT_EQ(text.exit_code, 0) << text.err;
  expect_refused(generate + at("model") + " --layout tpla:g=2", "no side file of a conversion (tpla.json)");
  expect_refused(generate + at("converted") + " --layout tpla:g=4", "converted for 2 shards");
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
  expect_refused(eval + "--out x --prefix 3", "--prefix 3: it goes with --mode decode");
  folder_.write("ids.txt", "3 400");
  expect_refused(eval + "--out x", "word 2 is '400', not a token id from 0 to 399");
  folder_.write("ids.txt", "3 4x");
  expect_refused(eval + "--out x", "word 2 is '4x'");
  folder_.write("ids.txt", " \n");
  expect_refused(eval + "--out x", "no token ids");
}

}  // namespace
}  // namespace isomer
