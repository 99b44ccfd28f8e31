// `isomer compare` as a user runs it: its JSON, its dry run at a real size, and every kind of mistake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cost/scheme_bytes.h"
#include "sharding/sequence_layout.h"
#include "study/program.h"

namespace isomer {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_isomer;

const std::vector<std::string> kSchemes = {
    "explicit", "explicit-shared-rope", "absorbed",   "absorbed-two-product", "laga",
    "ring",     "latent-gather",        "latent-ring"};

json run_with_json(const std::string& arguments, double* seconds = nullptr) {
  const TempFolder folder;
  const auto file = folder.path() / "result.json";
  const ProgramResult result = run_isomer(fmt::format("compare {} --json {}", arguments, file.string()));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
  if (seconds != nullptr) *seconds = result.seconds;
  return json::parse(testing::text_of(file));
}

std::vector<std::string> names_of(const json& report) {
  std::vector<std::string> names;
  for (const auto& scheme : report.at("schemes")) names.push_back(scheme.at("layout"));
  return names;
}

TEST(CompareProgram, WritesEveryDocumentedKey) {
  const json report = run_with_json("--model tiny-mla --seq 64 --ranks 2");
  for (const char* key : {"schema_version", "version", "machine", "processor", "threads", "seed"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
  EXPECT_EQ(report.at("model"), "tiny-mla");
  EXPECT_EQ(report.at("ranks"), 2);
  EXPECT_EQ(report.at("seq"), 64);
  EXPECT_EQ(report.at("dtype"), "f32");
  EXPECT_EQ(report.at("good"), true);
  EXPECT_EQ(names_of(report), kSchemes);
  for (const auto& scheme : report.at("schemes")) {
    SCOPED_TRACE(scheme.at("name").get<std::string>());
    EXPECT_EQ(scheme.at("layout"), scheme.at("name"));
    EXPECT_GT(scheme.at("bytes_sent_per_rank").get<std::int64_t>(), 0);
    EXPECT_EQ(scheme.at("bytes_sent_per_rank"), scheme.at("bytes_predicted_per_rank"));
    EXPECT_GT(scheme.at("peak_activation_bytes").get<std::int64_t>(), 0);
    EXPECT_EQ(scheme.at("peak_activation_bytes"), scheme.at("peak_activation_predicted_bytes"));
    EXPECT_GT(scheme.at("seconds").get<double>(), 0);
    EXPECT_THAT(scheme.at("clock").get<std::string>(), ::testing::AnyOf("wall", "virtual"));
    // Rounding, not nothing and not a wrong formula: float32 against float64.
    EXPECT_GT(scheme.at("max_abs_error").get<double>(), 1e-9);
    EXPECT_LT(scheme.at("max_abs_error").get<double>(), 1e-3);
    EXPECT_GT(scheme.at("max_grad_rel_error").get<double>(), 1e-9);
    EXPECT_LT(scheme.at("max_grad_rel_error").get<double>(), 1e-3);
    EXPECT_EQ(scheme.at("exact"), true);
    EXPECT_EQ(scheme.at("within_bound"), true);
    EXPECT_EQ(scheme.at("ranks").size(), 2u);
  }
}

TEST(CompareProgram, ATableThatIsLostIsAFailure) {
  const ProgramResult result = run_isomer("compare --model tiny-mla --seq 64 --dry-run >/dev/full");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("can't be written: No space left on device"));
}

TEST(CompareProgram, ADryRunWritesNullForWhatItCanNotMeasure) {
  const json report = run_with_json("--model tiny-mla --seq 64 --ranks 2 --dry-run");
  const json real = run_with_json("--model tiny-mla --seq 64 --ranks 2 --schemes 'laga;absorbed'");
  EXPECT_EQ(names_of(report), kSchemes);
  for (const auto& scheme : report.at("schemes")) {
    for (const char* key :
         {"peak_activation_bytes", "seconds", "clock", "max_abs_error", "max_grad_rel_error", "within_bound"}) {
      EXPECT_TRUE(scheme.at(key).is_null()) << key;
    }
    EXPECT_EQ(scheme.at("bytes_sent_per_rank"), scheme.at("bytes_predicted_per_rank"));
    EXPECT_GT(scheme.at("peak_activation_predicted_bytes").get<std::int64_t>(), 0);
    for (const auto& measured : real.at("schemes")) {
      if (measured.at("name") != scheme.at("name")) continue;
      EXPECT_EQ(measured.at("bytes_sent_per_rank"), scheme.at("bytes_sent_per_rank"));
      EXPECT_EQ(measured.at("peak_activation_bytes"), scheme.at("peak_activation_predicted_bytes"));
    }
  }
}

TEST(CompareProgram, RanksAreTheProductOfTheAxes) {
  const json report = run_with_json("--model tiny-mla --seq 64 --schemes 'laga:2,ring:3;latent-ring'");
  EXPECT_EQ(report.at("ranks"), 6);
  EXPECT_EQ(names_of(report), (std::vector<std::string>{"laga:2,ring:3", "latent-ring"}));
  EXPECT_EQ(report.at("good"), true);
}

TEST(CompareProgram, DryRunOfDeepSeekV3On64RanksTakesNoTime) {
  double seconds = 0;
  const json report = run_with_json("--model deepseek-v3 --seq 128K --ranks 64 --dtype bf16 --dry-run", &seconds);
  EXPECT_LT(seconds, 15);  // eleven layouts, a second on an idle machine
  const ModelConfig config = load_model_config("deepseek-v3");
  std::vector<std::string> expected = kSchemes;
  expected.insert(expected.end(), {"explicit:32,ring:2", "laga:32,ring:2", "laga:32,latent-ring:2"});
  ASSERT_EQ(names_of(report), expected);
  for (const auto& scheme : report.at("schemes")) {
    const Layout layout = sized_layout(parse_layout(scheme.at("layout").get<std::string>()), 64);
    const auto closed = scheme_bytes_sent({layout, config, 128 * 1024, 1, DType::bf16}, 0);
    EXPECT_EQ(scheme.at("bytes_sent_per_rank").get<std::int64_t>(), closed.total());
    EXPECT_EQ(scheme.at("ranks").size(), 64u);
  }
}

TEST(CompareProgram, GroupedQueryModelsRunTheirSchemesAndSayWhyNotTheOthers) {
  const json report = run_with_json("--model smollm2-135m --seq 61 --ranks 3");
  EXPECT_EQ(report.at("good"), true);
  EXPECT_EQ(names_of(report), (std::vector<std::string>{"explicit", "ring"}));
  std::vector<std::string> omitted;
  for (const auto& entry : report.at("omitted")) {
    omitted.push_back(entry.at("layout"));
    EXPECT_THAT(entry.at("reason").get<std::string>(), HasSubstr("latent attention"));
  }
  EXPECT_THAT(omitted, ::testing::IsSupersetOf({"laga", "absorbed", "latent-gather"}));
  EXPECT_EQ(omitted.size(), kSchemes.size() - 2);
  const json large = run_with_json("--model llama-3.1-405b --seq 128K --ranks 64 --dtype bf16 --dry-run");
  EXPECT_EQ(names_of(large), (std::vector<std::string>{"explicit", "ring", "explicit:32,ring:2"}));
}

/// Ended by an exit status of its own, with one line on stderr that has all of `parts`, and no table on stdout.
void expect_refused(const std::string& arguments, const std::vector<std::string>& parts) {
  SCOPED_TRACE("isomer " + arguments);
  const ProgramResult result = run_isomer(arguments);
  EXPECT_GT(result.exit_code, 0);
  EXPECT_LT(result.exit_code, 126) << "a crash, not a refusal";
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(result.err.starts_with("isomer: ")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const std::string& part : parts) EXPECT_THAT(result.err, HasSubstr(part));
}

TEST(CompareProgram, RefusesWrongValuesWithWhatWouldBeRight) {
  const std::string tiny = "compare --model tiny-mla --seq 64 ";
  expect_refused("compare --model deepseek-v33", {"deepseek-v33", "deepseek-v3"});
  expect_refused("compare --model llama-3.1-405b --schemes laga", {"laga", "grouped-query", "explicit, ring"});
  expect_refused(tiny + "--schemes lago", {"lago", "laga", "explicit"});
  expect_refused(tiny + "--schemes laga:v=neither", {"v=neither", "v=copy", "v=view"});
  expect_refused(tiny + "--schemes explicit:v=copy", {"explicit", "'v'"});
  expect_refused(tiny + "--schemes laga:attention=slow", {"attention=slow", "eager", "fused"});
  expect_refused(tiny + "--schemes absorbed:2,ring:2", {"absorbed:2,ring:2", "ring"});
  expect_refused(tiny + "--schemes ''", {"laga"});
  expect_refused(tiny + "--frobnicate 3", {"--frobnicate", "--help"});
  expect_refused(tiny + "--dtype f16", {"--dtype", "f16", "f32", "bf16"});
  expect_refused(tiny + "--attention flash", {"--attention", "flash", "eager", "fused"});
  expect_refused(tiny + "--ranks 0", {"--ranks", "0", "1"});
  expect_refused(tiny + "--ranks -1", {"--ranks", "-1", "1"});
  expect_refused(tiny + "--ranks 1000000", {"--ranks", "1000000", "4096"});
  expect_refused(tiny + "--ranks two", {"--ranks", "two"});
  expect_refused(tiny + "--ranks 5 --schemes laga", {"16 heads", "5 ranks", "1, 2, 4, 8, 16"});
  expect_refused(tiny + "--ranks 4 --schemes laga:2", {"laga:2", "2 ranks", "4"});
  expect_refused("compare --model tiny-mla --ranks 4 --seq 3", {"3 tokens", "4 ranks"});
  expect_refused("compare --model tiny-mla --seq 0", {"--seq", "0", "between 1 and"});
  expect_refused("compare --model tiny-mla --seq -64", {"--seq", "-64", "between 1 and"});
  expect_refused("compare --model tiny-mla --seq 12Q", {"--seq", "12Q", "16K"});
  expect_refused("compare --model tiny-mla --seq 99999999999999999999", {"--seq", "99999999999999999999"});
  expect_refused(tiny + "--link 5us", {"--link", "5us", "5us,2GB/s"});
  expect_refused(tiny + "--link 5us,2", {"--link bandwidth", "GB/s"});
  expect_refused(tiny + "--link 5us,0GB/s", {"--link", "5us,0GB/s", "at least 1000 B/s"});
  expect_refused(tiny + "--link 1e300s,1GB/s", {"--link", "1e300s", "at most 60 s"});
  expect_refused(tiny + "--seed -1", {"--seed", "-1", "from 0 to 18446744073709551615"});
  expect_refused(tiny + "--schemes 'laga;laga'", {"laga", "given twice"});
  expect_refused("compare --model tiny-mla --dry-run --seq 1G --batch 4096", {"--seq", "1G"});
  expect_refused(tiny + "--layer 99", {"--layer 99", "0 to 2"});
  expect_refused(tiny + "--layer -1", {"--layer", "-1"});
  expect_refused(tiny + "--timeout 0", {"--timeout", "0"});
  expect_refused("comprae", {"comprae", "compare"});
  expect_refused("", {"--help"});
}

TEST(CompareProgram, RefusesPlacesItCanNotReadOrWrite) {
  const TempFolder folder;
  const std::string path = folder.path().string();
  const std::string tiny = "compare --model tiny-mla --seq 64 ";
  expect_refused(tiny + "--json " + path + "/missing/result.json", {"--json", path + "/missing"});
  expect_refused(tiny + "--json " + path, {"--json", path, "directory"});
  expect_refused(tiny + "--text " + path + "/missing.txt", {path + "/missing.txt"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  folder.write("mine.txt", "not to be lost");
  expect_refused(tiny + "--dump " + path, {"--dump", path, "not an empty directory", "name a new one"});
  expect_refused(tiny + "--dump " + path + "/mine.txt", {"--dump", "mine.txt"});
  expect_refused(tiny + "--dry-run --dump " + path + "/new", {"--dump", "dry run"});
  EXPECT_EQ(testing::text_of(folder.path() / "mine.txt"), "not to be lost");
}

TEST(CompareProgram, RefusesABrokenCheckpointWithFileAndPlace) {
  const TempFolder folder;
  const std::string path = folder.path().string();
  const std::string compare = "compare --seq 64 --model " + path;
  expect_refused(compare, {path, "config.json"});
  folder.write("config.json", "{\"model_type\": ");
  expect_refused(compare, {path + "/config.json"});
  folder.write("config.json", testing::text_of(std::string(ISOMER_SOURCE_DIR) + "/models/tiny-mla/config.json"));
  folder.write("model.safetensors", "12345");
  expect_refused(compare, {path + "/model.safetensors", "byte 0"});
  folder.write("model.safetensors",
               safetensors_bytes(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})", "short"));
  expect_refused(compare, {path + "/model.safetensors"});
  folder.write("model.safetensors", safetensors_bytes("{}", ""));
  expect_refused(compare, {"input_layernorm.weight"});
}

}  // namespace
}  // namespace isomer
