// A real model, where ./dev fetch-smollm2 has put it: its logits against NumPy's, and what it answers.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "full_tests.h"
#include "model/checkpoint.h"
#include "study/program.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::full_tests;
using ::testing::HasSubstr;
using testing::run_isomer;
using testing::text_of;

const std::string kSource = ISOMER_SOURCE_DIR;
const std::string kModel = kSource + "/models/external/SmolLM2-135M-Instruct.Q4_1.gguf";

class SmolLm2 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kModel)) GTEST_SKIP() << "models/external has no SmolLM2: ./dev fetch-smollm2 gets it";
  }
  nlohmann::json answer(const std::string& options) const {
    const auto out = folder_.path() / "out.json";
    const auto result =
        run_isomer(fmt::format("generate --model {} --chat --json {} {}", kModel, out.string(), options));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("tokens/s"));
    return nlohmann::json::parse(text_of(out))["sequences"][0];
  }
  const TempFolder folder_;
};

TEST_F(SmolLm2, LogitsAreThoseOfNumPy) {
  const auto record = nlohmann::json::parse(text_of(kSource + "/tests/golden/gguf/smollm2_logits.json"));
  const auto ids = record["ids"].get<std::vector<std::int32_t>>();
  std::string words;
  for (const auto id : ids) words += fmt::format("{} ", id);
  const auto file = folder_.write("ids.txt", words);
  const auto out = folder_.path() / "logits.safetensors";
  const auto result =
      run_isomer(fmt::format("eval logits --model {} --ids {} --out {}", kModel, file.string(), out.string()));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Tensor logits = Checkpoint::open(out).read("logits", DType::f64);
  const std::int64_t vocabulary = logits.size(1);
  double nats = 0;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    const double* row = logits.data<double>() + static_cast<std::int64_t>(t) * vocabulary;
    const auto best = std::max_element(row, row + vocabulary) - row;
    EXPECT_EQ(best, record["first_choices"][t].get<std::int64_t>()) << t;
    EXPECT_NEAR(row[best], record["logits"][t].get<double>(), 2e-3) << t;  // of logits up to 35: float32, 30 layers
    if (t + 1 == ids.size()) break;
    double sum = 0;
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += std::exp(row[i] - row[best]);
    nats += row[best] + std::log(sum) - row[ids[t + 1]];
  }
  EXPECT_NEAR(nats / static_cast<double>(ids.size() - 1), record["nats_per_token"].get<double>(), 1e-5);
}

TEST_F(SmolLm2, AnswersAQuestion) {
  const auto one = answer("--prompt 'What is the capital of France?' --tokens 16 --dtype bf16");
  EXPECT_THAT(one["text"].get<std::string>(), HasSubstr("Paris"));
}

/// 9 query heads on 3 KV heads: layouts that share KV groups out evenly, unevenly (tpa=2), and beyond their number.
TEST_F(SmolLm2, AnswersTheSameUnderOtherLayouts) {
  const std::string question =
      fmt::format("--prompt 'Tell me a long story about a lighthouse.' --ignore-eos --tokens {} --layout ",
                  full_tests() ? 256 : 12);
  std::vector<std::string> layouts = {"tp:3", "kvp:3", "helix:kvp=2,tpa=2,tpf=4,ep=1"};
  if (full_tests()) {
    for (const char* layout : {"tp:9", "kvp:9", "pp:3", "helix:kvp=2,tpa=1,tpf=2,ep=1", "helix:kvp=2,tpa=3,tpf=6,ep=1",
                               "helix:kvp=1,tpa=9,tpf=9,ep=1", "helix:kvp=2,tpa=3,tpf=6,ep=1,hopb=off",
                               "helix:kvp=3,tpa=1,tpf=3,ep=1,q=gather", "medha:kvp=4,tpa=1", "medha:kvp=2,tpa=3"}) {
      layouts.emplace_back(layout);
    }
  }
  const auto one = answer(question + "tp:1");
  for (const std::string& layout : layouts) {
    EXPECT_EQ(answer(question + layout)["token_ids"], one["token_ids"]) << layout;
  }
}

}  // namespace
}  // namespace isomer
