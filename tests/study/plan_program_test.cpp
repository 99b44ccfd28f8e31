// isomer plan fit and plan validate as a user meets them.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "program.h"

namespace isomer::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// A device of 1 µs launch, 100 TFLOP/s and 1 TB/s, to the letter.
std::string table() {
  std::string text = "operation,compute,m,n,k,seconds\n";
  for (std::int64_t m = 1; m <= 4096; m *= 4)
    for (std::int64_t n = 64; n <= 16384; n *= 4)
      for (std::int64_t k = 64; k <= 16384; k *= 4) {
        const auto dm = static_cast<double>(m), dn = static_cast<double>(n), dk = static_cast<double>(k);
        const double seconds = 1e-6 + std::max(2 * dm * dn * dk / 1e14, 2 * (dm * dk + dk * dn + dm * dn) / 1e12);
        text += fmt::format("gemm,bf16,{},{},{},{:.9g}\n", m, n, k, seconds);
      }
  return text;
}

class PlanProgram : public ::testing::Test {
 protected:
  PlanProgram() : folder_(std::filesystem::path(::testing::TempDir()) / "plan_program") {
    std::filesystem::create_directories(folder_);
    std::ofstream(path("table.csv")) << table();
  }
  ~PlanProgram() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  json read(const std::string& name) const { return json::parse(std::ifstream(path(name))); }

 private:
  std::filesystem::path folder_;
};

TEST_F(PlanProgram, FitsAUsersTableAndValidatesIt) {
  const auto fit = run_isomer(fmt::format("plan fit --table {} --hardware a100 --out {} --json {}", path("table.csv"),
                                          path("mine.json"), path("fit.out")));
  ASSERT_EQ(fit.exit_code, 0) << fit.err;
  EXPECT_THAT(fit.out, HasSubstr("gemm bf16"));
  const json mine = read("mine.json");
  EXPECT_EQ(mine["name"], "mine");
  EXPECT_EQ(mine["memory"]["bandwidth_bytes_per_s"], 2.039e12) << "the base's figures stay";
  ASSERT_EQ(mine["curves"].size(), 1u);
  EXPECT_NEAR(mine["curves"][0]["launch_s"].get<double>(), 1e-6, 1e-7);
  EXPECT_NEAR(mine["curves"][0]["compute_share"].get<double>(), 100.0 / 312, 0.02);
  EXPECT_NEAR(mine["curves"][0]["bytes_share"].get<double>(), 1 / 2.039, 0.03);
  EXPECT_EQ(read("fit.out")["command"], "plan fit");
  const auto check = run_isomer(fmt::format("plan validate --table {} --hardware {} --json {}", path("table.csv"),
                                            path("mine.json"), path("validate.out")));
  EXPECT_EQ(check.exit_code, 0) << check.err << check.out;
  EXPECT_LT(read("validate.out")["systems"][0]["operations"][0]["held_back"]["mean_error"].get<double>(), 0.02);
}

TEST_F(PlanProgram, TheSameTableGivesTheSameFile) {
  for (const char* out : {"a.json", "b.json"}) {
    const auto fit =
        run_isomer(fmt::format("plan fit --table {} --hardware a100 --out {}", path("table.csv"), path(out)));
    ASSERT_EQ(fit.exit_code, 0) << fit.err;
  }
  json a = read("a.json"), b = read("b.json");
  b["name"] = a["name"];
  EXPECT_EQ(a, b);
}

TEST_F(PlanProgram, ACurveThatDoesNotFitFailsWithItsWorstRows) {
  // H200's own curve says what an H200 does, not this device.
  const auto check = run_isomer(fmt::format("plan validate --table {} --hardware h200", path("table.csv")));
  EXPECT_EQ(check.exit_code, 1) << check.err;
  EXPECT_THAT(check.out, HasSubstr("misses its aim; worst rows held back"));
  EXPECT_THAT(check.out, HasSubstr("Some operations miss their aim."));
}

TEST_F(PlanProgram, MistakesAreNamed) {
  const auto complaint = [](const std::string& arguments) {
    const auto result = run_isomer(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    return result.err;
  };
  const std::string table = path("table.csv");
  EXPECT_THAT(complaint("plan fit --out x.json"), HasSubstr("give either --silicon DIR"));
  EXPECT_THAT(complaint(fmt::format("plan fit --table {} --out x.json", table)), HasSubstr("--table needs --hardware"));
  EXPECT_THAT(complaint(fmt::format("plan fit --table {} --hardware a100 --out x.json", path("none.csv"))),
              HasSubstr("none.csv"));
  EXPECT_THAT(complaint(fmt::format("plan validate --table {} --hardware a10", table)), HasSubstr("did you mean a100"));
  EXPECT_THAT(complaint(fmt::format("plan validate --silicon {}", path("nowhere"))), HasSubstr("holds none of the"));
  EXPECT_THAT(complaint(fmt::format("plan fit --table {} --hardware a100 --out /nowhere/x.json", table)),
              HasSubstr("could not be written"));
  EXPECT_THAT(complaint("probe --ranks 0 --out x.json"), HasSubstr("--ranks 0: must lie between 1 and 64"));
  EXPECT_THAT(complaint("plan"), HasSubstr("subcommand"));
}

}  // namespace
}  // namespace isomer::testing
