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
  EXPECT_THAT(complaint("plan decode --ttl -1ms"), HasSubstr("--ttl -1ms: must be at least 1ns"));
  EXPECT_THAT(complaint("plan decode --ttl 25m"),
              HasSubstr("'25m': expected a number followed by one of ns, us, ms, s"));
  EXPECT_THAT(complaint("plan train --link-bandwidth 0GB/s"),
              HasSubstr("--link-bandwidth 0GB/s: must be at least 1MB/s"));
  EXPECT_THAT(complaint("plan train --memory 1e400GB"), HasSubstr("must be at most"));
  EXPECT_THAT(complaint("plan train --sequence 3"), HasSubstr("isomer plan train --help"));
  EXPECT_THAT(complaint("probe --ranks 0 --out x.json"), HasSubstr("--ranks 0: must lie between 1 and 64"));
  EXPECT_THAT(complaint("plan"), HasSubstr("subcommand"));
}

TEST_F(PlanProgram, APlaceThatCantBeWrittenIsToldBeforeTheWork) {
  const std::string table = path("table.csv"), none = "/nowhere/x.json";
  for (const std::string& command :
       {fmt::format("plan fit --table {} --hardware a100 --out {}", table, none),
        fmt::format("plan fit --table {} --hardware a100 --out {} --json {}", table, path("x.json"), none),
        fmt::format("plan validate --table {} --hardware a100 --json {}", table, none),
        fmt::format("plan decode --html {}", none), fmt::format("plan decode --json {}", none),
        fmt::format("plan train --html {}", none), fmt::format("plan train --json {}", none),
        fmt::format("plan block --json {}", none), fmt::format("probe --out {}", none),
        fmt::format("probe --out {} --json {}", path("x.json"), none), fmt::format("claims laga --json {}", none),
        fmt::format("compare --json {}", none)}) {
    const auto result = run_isomer(command);
    EXPECT_EQ(result.exit_code, 2) << command;
    EXPECT_THAT(result.err, HasSubstr("there is no directory '/nowhere'")) << command;
    EXPECT_EQ(result.out, "") << command;
  }
  EXPECT_THAT(run_isomer(fmt::format("plan decode --json {0} --html {0}", path("x"))).err, HasSubstr("the same file"));
  EXPECT_THAT(run_isomer(fmt::format("plan fit --table {0} --hardware a100 --out {0}", table)).err,
              HasSubstr("the same file"));
  EXPECT_THAT(run_isomer(fmt::format("probe --out {}", path("."))).err, HasSubstr("it is a directory"));
}

TEST_F(PlanProgram, WhatWasThereStaysUntilTheNewIsWhole) {
  std::ofstream(path("old.json")) << "old";
  const auto result =
      run_isomer(fmt::format("plan block --hardware h100 --schemes \"laga:3\" --json {}", path("old.json")));
  EXPECT_EQ(result.exit_code, 2) << "128 heads over 3 ranks";
  std::string text;
  std::ifstream(path("old.json")) >> text;
  EXPECT_EQ(text, "old");
  EXPECT_EQ(run_isomer(fmt::format("plan block --json {}", path("old.json"))).exit_code, 0);
  EXPECT_EQ(read("old.json")["command"], "plan block");
  EXPECT_EQ(run_isomer("plan block --json /dev/null").exit_code, 0) << "a device is written as it is";
}

TEST_F(PlanProgram, NothingInAFileIsObeyedByTheTerminal) {
  const json base = json::parse(std::ifstream(std::string(ISOMER_SOURCE_DIR) + "/hardware/a100.json"));
  for (const std::string bad : {"evil\x1b[31m", "evil\u009b31m", "evil\nline", "evil\u007f"}) {
    for (const char* key : {"name", "description"}) {
      json hardware = base;
      hardware[key] = bad;
      std::ofstream(path("evil.json")) << hardware;
      const auto result = run_isomer(fmt::format("plan block --hardware {}", path("evil.json")));
      EXPECT_EQ(result.exit_code, 2) << key << result.out;
      EXPECT_THAT(result.err, HasSubstr("text without control characters"));
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
      for (const char* raw : {"\x1b", "\u009b", "\u007f"}) EXPECT_EQ(result.err.find(raw), std::string::npos);
    }
  }
  const auto argument = run_isomer("plan block --schemes \"$(printf '\\033[31m')\"");
  EXPECT_EQ(argument.exit_code, 2);
  EXPECT_EQ(argument.err.find('\x1b'), std::string::npos) << argument.err;
}

TEST_F(PlanProgram, TrainingPlansSayWhatBoundsThem) {
  const auto result = run_isomer(
      fmt::format("plan train --model deepseek-v2-lite --hardware h100 --devices 8 --seq 16K --json {} --html {}",
                  path("train.json"), path("train.html")));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* what : {"bound by", "priced, not executed: ", "loses on", "which depends most on", "* a baseline"}) {
    EXPECT_THAT(result.out, HasSubstr(what));
  }
  EXPECT_EQ(read("train.json")["command"], "plan train");
  EXPECT_GT(std::filesystem::file_size(path("train.html")), 100000u);
}

}  // namespace
}  // namespace isomer::testing
