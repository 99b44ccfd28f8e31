// isomer convert tpla and the evaluations of what it makes, as a user runs them.
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

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_isomer;
using testing::run_shell;
using testing::text_of;

/// A small seeded model, wide enough in its weights that shards differ, with a tokenizer and texts.
class ConvertProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string novel(default_text());
    folder_.write("text.txt", novel.substr(0, 30000));
    folder_.write("held-out.txt", novel.substr(100000, 2500));
    const auto made =
        run_isomer(fmt::format("tokenizer train --data {} --vocab-size 300 --out {}", at("text.txt"), at("model")));
    ASSERT_EQ(made.exit_code, 0) << made.err;
    write_model("model", json::object());
  }
  /// Writes config.json and weights of the small model with `changes`.
  void write_model(const std::string& name, const json& changes) const {
    json config = json::parse(load_model_config_text("tiny-mla"));
    config.update({{"vocab_size", 300},
                   {"hidden_size", 48},
                   {"num_hidden_layers", 2},
                   {"num_attention_heads", 4},
                   {"num_key_value_heads", 4},
                   {"kv_lora_rank", 24},
                   {"intermediate_size", 64},
                   {"max_position_embeddings", 128},
                   {"first_k_dense_replace", 2}});
    config.update(changes);
    fs::create_directories(folder_.path() / name);
    std::ofstream(folder_.path() / name / "config.json") << config.dump();
    const ModelConfig parsed = load_model_config(at(name));
    write_checkpoint(folder_.path() / name,
                     model_tensor_sources(initial_model_weights(parsed, 1, DType::f32, 0.3), DType::bf16), 1 << 30);
  }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string convert_command(const std::string& more = "", const std::string& out = "out") const {
    return fmt::format("convert tpla --model {} --calibrate {} --out {} --calibration-tokens 1K --window 64 {}",
                       at("model"), at("text.txt"), at(out), more);
  }
  void convert(const std::string& more = "", const std::string& out = "out") const {
    const auto result = run_isomer(convert_command(more, out));
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  json evaluated(const std::string& arguments) const {
    const auto result = run_isomer(
        fmt::format("eval {} --data {} --window 64 --json {}", arguments, at("held-out.txt"), at("eval.json")));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(text_of(folder_.path() / "eval.json"));
  }
  void expect_refused(const std::string& arguments, const std::vector<std::string>& parts) const {
    const auto result = run_isomer(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    for (const std::string& part : parts) EXPECT_THAT(result.err, HasSubstr(part)) << arguments;
  }
  TempFolder folder_;
};

TEST_F(ConvertProgram, AConvertedCheckpointIsTheSameModelForAnyone) {
  const auto made = run_isomer(convert_command("--shards 2 --transform pca --json " + at("report.json")));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_THAT(made.out, HasSubstr("largest difference of a logit"));
  EXPECT_THAT(made.out, HasSubstr("not exact"));
  const json report = json::parse(text_of(folder_.path() / "report.json"));
  EXPECT_EQ(report["command"], "convert tpla");
  EXPECT_EQ(report["cache_elements"], 24 / 2 + 16);
  EXPECT_EQ(report["calibration"]["files"][0]["name"], "text.txt");
  // Rewritten weights are rounded to bfloat16 again; the forward is float32.
  EXPECT_LT(report["report"]["largest_logit_difference"].get<double>(),
            0.1 * report["report"]["largest_logit"].get<double>());
  EXPECT_EQ(run_isomer("inspect " + at("out")).exit_code, 0);
  // The ordinary evaluation, which knows nothing of shards.
  const double before = evaluated("perplexity --model " + at("model"))["nats_per_token"];
  const json after = evaluated("perplexity --model " + at("out"));
  EXPECT_NEAR(after["nats_per_token"].get<double>(), before, 0.02 * before);
  EXPECT_EQ(after["exact"], true);
  EXPECT_EQ(text_of(folder_.path() / "out/tokenizer.json"), text_of(folder_.path() / "model/tokenizer.json"));
}

TEST_F(ConvertProgram, ModesOfPerplexity) {
  convert("--rms sliced --kappa lsq");
  const json decode = evaluated("perplexity --layout tpla:g=2 --model " + at("out"));
  EXPECT_EQ(decode["mode"], "decode");
  EXPECT_EQ(decode["overlap"], 32);
  EXPECT_EQ(decode["exact"], false);
  const json every = evaluated("perplexity --layout tpla --mode every-position --overlap 32 --model " + at("out"));
  const json prefill = evaluated("perplexity --layout tpla --mode prefill --overlap 32 --model " + at("out"));
  EXPECT_EQ(prefill["exact"], true);
  EXPECT_EQ(decode["tokens_scored"], every["tokens_scored"]);
  EXPECT_EQ(decode["tokens_scored"], prefill["tokens_scored"]);
  EXPECT_NE(decode["nats_per_token"], every["nats_per_token"]);
  const json gla = evaluated("perplexity --layout gla:2 --overlap 32 --model " + at("model"));
  EXPECT_EQ(gla["layout"], "gla:g=2,tp=1");
  // Teacher forcing sees nothing of decode: an exact prefill is the ordinary forward's perplexity.
  const json whole = evaluated("perplexity --layout gla:1 --overlap 32 --mode decode --model " + at("out"));
  EXPECT_NEAR(whole["nats_per_token"].get<double>(), prefill["nats_per_token"].get<double>(), 1e-5);
  const auto text = run_isomer(
      fmt::format("eval perplexity --model {} --layout tpla:g=2 --data {} --window 64", at("out"), at("held-out.txt")));
  EXPECT_THAT(text.out, HasSubstr("NOT EXACT"));
  EXPECT_THAT(text.out, HasSubstr("mode decode: the first 32 tokens by exact prefill"));
}

TEST_F(ConvertProgram, HeadsThatRanksCannotShareOutAreEvaluatedOnOne) {
  write_model("odd", {{"num_attention_heads", 3}, {"num_key_value_heads", 3}});
  fs::copy_file(folder_.path() / "model/tokenizer.json", folder_.path() / "odd/tokenizer.json");
  const auto made = run_isomer(
      fmt::format("convert tpla --model {} --calibrate {} --out {} --shards 4 --calibration-tokens 1K --window 64",
                  at("odd"), at("text.txt"), at("odd-tpla")));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const std::string pair = "kl --base " + at("odd") + " --model " + at("odd-tpla") + " --layout tpla:g=4 ";
  const json prefill = evaluated(pair + "--mode prefill"), decode = evaluated(pair);
  EXPECT_EQ(decode["exact"], false);
  EXPECT_LT(prefill["mean_kl"].get<double>(), 0.1 * decode["mean_kl"].get<double>());  // rounding to bfloat16 alone
  const std::string perplexity =
      fmt::format("eval perplexity --model {} --data {} --window 64 --layout ", at("odd-tpla"), at("held-out.txt"));
  const auto text = run_isomer(perplexity + "tpla:g=4");
  EXPECT_THAT(text.out, HasSubstr("tpla:g=4,tp=1, 1 rank, NOT EXACT"));
  EXPECT_THAT(text.out, HasSubstr("one rank computes all shards in turn"));
  expect_refused(perplexity + "tpla:g=2", {"converted for 4 shards"});
  expect_refused(perplexity + "tpla:g=4 --dtype bf16", {"4 ranks are more than the 3 heads"});
  expect_refused(perplexity + "tp:2", {"3 heads can't be spread over 2 ranks"});
}

TEST_F(ConvertProgram, DivergenceFromTheBase) {
  convert("--shards 2");
  const std::string pair = "kl --base " + at("model") + " --model " + at("out") + " --layout tpla:g=2 ";
  const json decode = evaluated(pair);
  EXPECT_EQ(decode["command"], "eval kl");
  EXPECT_EQ(decode["exact"], false);
  const double mean = decode["mean_kl"], median = decode["kl_percentiles"]["50"], most = decode["largest_kl"];
  EXPECT_GT(mean, 1e-3);
  EXPECT_LE(median, decode["kl_percentiles"]["99"].get<double>());
  EXPECT_LE(decode["kl_percentiles"]["99"].get<double>(), decode["kl_percentiles"]["99.9"].get<double>());
  EXPECT_LE(decode["kl_percentiles"]["99.9"].get<double>(), most);
  const json prefill = evaluated(pair + "--mode prefill");
  EXPECT_EQ(prefill["exact"], true);
  EXPECT_LT(prefill["mean_kl"].get<double>(), 0.1 * mean);  // what bfloat16 rounding leaves
  EXPECT_EQ(prefill["nats_per_token_base"], decode["nats_per_token_base"]);
  const auto text = run_isomer(fmt::format("eval {} --data {} --window 64", pair, at("held-out.txt")));
  for (const char* part : {"percentile 99.9", "same most probable token", "change of the true token", "NOT EXACT"}) {
    EXPECT_THAT(text.out, HasSubstr(part));
  }
}

TEST_F(ConvertProgram, AlignmentIsReportedAsLossy) {
  const auto made = run_isomer(convert_command("--align 20 --json " + at("report.json")));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  EXPECT_THAT(made.out, HasSubstr("no longer the original's"));
  const json report = json::parse(text_of(folder_.path() / "report.json"));
  EXPECT_EQ(report["align_steps"], 20);
  ASSERT_EQ(report["alignment"].size(), 2U);
  EXPECT_LT(report["alignment"][0]["after"], report["alignment"][0]["before"]);
  // Its whole attention moved, and the report says by how much.
  convert("", "plain");
  const std::string base = "kl --mode prefill --base " + at("model") + " --model ";
  EXPECT_GT(evaluated(base + at("out"))["mean_kl"], evaluated(base + at("plain"))["mean_kl"]);
}

TEST_F(ConvertProgram, HeadsOfAConvertedCheckpoint) {
  convert("--shards 4 --shared-columns 8 --transform query-aware");
  const json heads = evaluated("heads --model " + at("out"));
  EXPECT_EQ(heads["shards"], 4);
  EXPECT_EQ(heads["shared_columns"], 8);
  ASSERT_EQ(heads["layers"].size(), 2U);
  EXPECT_EQ(heads["layers"][0]["cosine"].size(), 4U);     // heads
  EXPECT_EQ(heads["layers"][0]["cosine"][0].size(), 4U);  // shards
}

TEST_F(ConvertProgram, WrongInputIsRefusedAndNothingIsLeft) {
  expect_refused(convert_command("--shards 5"), {"--shards 5", "24", "take a divisor"});
  expect_refused(convert_command("--transform hadamard"), {"24", "no power of two"});
  expect_refused(convert_command("--transform svd"), {"svd", "hadamard"});
  expect_refused(convert_command("--shared-columns 25"), {"--shared-columns 25"});
  expect_refused(fmt::format("convert tpla --model {} --calibrate {} --out {} --window 4K", at("model"), at("text.txt"),
                             at("out")),
                 {"max_position_embeddings 128"});
  expect_refused(fmt::format("convert tpla --model {} --out {}", at("model"), at("out")), {"--calibrate is required"});
  expect_refused(
      fmt::format("convert tpla --model {} --calibrate {} --out {}", at("model"), at("absent.txt"), at("out")),
      {"absent.txt"});
  folder_.write("latin.txt", "caf\xe9 " + std::string(2000, 'a'));
  expect_refused(
      fmt::format("convert tpla --model {} --calibrate {} --out {}", at("model"), at("latin.txt"), at("out")),
      {"latin.txt", "UTF-8"});
  expect_refused(fmt::format("convert tpla --model deepseek-v3 --calibrate {} --out {}", at("text.txt"), at("out")),
                 {"deepseek-v3"});
  EXPECT_FALSE(fs::exists(folder_.path() / "out"));
  for (const auto& item : fs::directory_iterator(folder_.path())) {
    EXPECT_THAT(item.path().string(), Not(HasSubstr(".part-")));
  }
  fs::create_directories(folder_.path() / "taken");
  folder_.write("taken/keep", "mine");
  expect_refused(convert_command("", "taken"), {"taken", "it is there already"});
  EXPECT_EQ(text_of(folder_.path() / "taken/keep"), "mine");
}

TEST_F(ConvertProgram, AModelWithoutALatentIsRefused) {
  json llama = json::parse(load_model_config_text("smollm2-135m"));
  llama.update({{"vocab_size", 300},
                {"hidden_size", 48},
                {"num_hidden_layers", 1},
                {"num_attention_heads", 4},
                {"num_key_value_heads", 2},
                {"intermediate_size", 32}});
  llama.erase("head_dim");
  fs::create_directories(folder_.path() / "llama");
  folder_.write("llama/config.json", llama.dump());
  fs::copy_file(folder_.path() / "model/tokenizer.json", folder_.path() / "llama/tokenizer.json");
  const ModelConfig parsed = load_model_config(at("llama"));
  write_checkpoint(folder_.path() / "llama",
                   model_tensor_sources(initial_model_weights(parsed, 1, DType::f32), DType::f32), 1 << 30);
  expect_refused(fmt::format("convert tpla --model {} --calibrate {} --out {}", at("llama"), at("text.txt"), at("out")),
                 {"grouped-query"});
  expect_refused(fmt::format("eval perplexity --layout gla:2 --model {} --data {}", at("llama"), at("held-out.txt")),
                 {"grouped-query"});
}

TEST_F(ConvertProgram, ADamagedOrMissingSideFileIsNamed) {
  const std::string data = " --data " + at("held-out.txt");
  expect_refused("eval heads --model " + at("model") + data, {"tpla.json is missing", "isomer convert tpla"});
  expect_refused("eval perplexity --layout tpla:g=2 --model " + at("model") + data, {"tpla.json is missing"});
  convert();
  expect_refused("eval perplexity --layout tpla:g=4 --model " + at("out") + data, {"converted for 2 shards"});
  expect_refused("eval perplexity --layout tpla:g=2,xo=scatter --model " + at("out") + data, {"xo"});
  expect_refused("eval perplexity --layout explicit --mode decode --model " + at("out") + data, {"tp, gla, tpla"});
  expect_refused("eval perplexity --layout tpla --mode all --model " + at("out") + data, {"every-position"});
  const std::string side = text_of(folder_.path() / "out/tpla.json");
  folder_.write("out/tpla.json", side.substr(0, side.size() / 2));
  expect_refused("eval heads --model " + at("out") + data, {"out/tpla.json"});
  folder_.write("out/tpla.json", side);
  std::string scalars = text_of(folder_.path() / "out/tpla.safetensors");
  scalars[scalars.size() - 1] = static_cast<char>(scalars.back() ^ 1);
  folder_.write("out/tpla.safetensors", scalars);
  expect_refused("eval kl --base " + at("model") + " --model " + at("out") + data, {"tpla.safetensors has hash"});
  fs::copy_file(folder_.path() / "model/model.safetensors", folder_.path() / "out/model.safetensors",
                fs::copy_options::overwrite_existing);
  expect_refused("eval heads --model " + at("out") + data, {"tpla"});
}

TEST_F(ConvertProgram, ATokenizerThatIsNotTheModelsIsRefused) {
  ASSERT_EQ(
      run_isomer(fmt::format("tokenizer train --data {} --vocab-size 290 --out {}", at("held-out.txt"), at("other")))
          .exit_code,
      0);
  const std::string with_other =
      fmt::format(" --model {} --data {} --tokenizer {}", at("model"), at("held-out.txt"), at("other"));
  expect_refused("eval perplexity" + with_other, {"--tokenizer", "its id", "own tokenizer.json"});
  expect_refused("eval perplexity --layout gla:2" + with_other, {"--tokenizer", "its id"});
  expect_refused(convert_command("--tokenizer " + at("other")), {"--tokenizer", "its id"});
  const auto same = run_isomer(fmt::format("eval perplexity --model {0} --data {1} --tokenizer {0} --window 64",
                                           at("model"), at("held-out.txt")));
  EXPECT_EQ(same.exit_code, 0) << same.err;
}

TEST_F(ConvertProgram, AKilledConversionLeavesNothingUnderTheName) {
  // Killed at several moments; the last when the directory beside the final one has appeared.
  for (const std::string when :
       {"sleep 0.02", "sleep 0.1", "sleep 0.2", "until ls out.part-* || ! kill -0 $p; do :; done"}) {
    const auto killed = run_shell(fmt::format(
        "cd {}; {}/isomer {} > log & p=$!; ({}) > /dev/null 2>&1; kill -9 $p; wait $p; test -e out && echo whole; true",
        folder_.path().string(), ISOMER_BINARY_DIR, convert_command(), when));
    if (killed.out.find("whole") != std::string::npos) {
      // It was faster: then everything is there.
      EXPECT_EQ(run_isomer(fmt::format("eval heads --window 64 --model {} --data {}", at("out"), at("held-out.txt")))
                    .exit_code,
                0);
      fs::remove_all(folder_.path() / "out");
    } else {
      EXPECT_FALSE(fs::exists(folder_.path() / "out")) << when;
    }
  }
  convert();  // what a killed one left is no hindrance
  EXPECT_TRUE(fs::exists(folder_.path() / "out/tpla.json"));
}

}  // namespace
}  // namespace isomer
