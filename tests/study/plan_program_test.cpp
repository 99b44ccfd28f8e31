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

TEST_F(PlanProgram, AFitKeepsTheCurvesThatTheTableLacks) {
  const auto fit = run_isomer(fmt::format("plan fit --table {} --hardware h200 --out {} --json {}", path("table.csv"),
                                          path("mine.json"), path("fit.out")));
  ASSERT_EQ(fit.exit_code, 0) << fit.err;
  EXPECT_THAT(fit.out, HasSubstr("kept of h200: "));
  const json kept = read("fit.out")["kept"];
  EXPECT_EQ(read("mine.json")["curves"].size(), kept.size() + read("fit.out")["curves"].size());
  EXPECT_GT(kept.size(), 10u);
  for (const json& label : kept) EXPECT_NE(label, "gemm bf16") << "that is the table's";
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

std::string complaint_of(const std::string& arguments) {
  const auto result = run_isomer(arguments);
  EXPECT_EQ(result.exit_code, 2) << arguments << result.out;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  return result.err;
}

TEST_F(PlanProgram, BlockPlansRefuseWhatCompareRefuses) {
  for (const char* layout : {"laga:16,kv=wrong", "laga:16,recompute=wrong", "laga:16,foo=1", "lagga:16"}) {
    const std::string plan = complaint_of(fmt::format("plan block --schemes '{}'", layout));
    EXPECT_EQ(plan, complaint_of(fmt::format("compare --model deepseek-v2-lite --dry-run --schemes '{}'", layout)))
        << layout;
  }
  EXPECT_THAT(complaint_of("plan block --schemes laga:16,kv=wrong"), HasSubstr("kv=wrong"));
  EXPECT_THAT(complaint_of("plan block --schemes laga:16,attention=eager"),
              HasSubstr("only attention=fused is priced"));
  // Another way to say kv=rebuild, and priced so.
  const auto rebuilt = run_isomer(
      fmt::format("plan block --schemes 'laga:4,kv=rebuild;laga:4,recompute=up-projection' --json {}", path("b.json")));
  ASSERT_EQ(rebuilt.exit_code, 0) << rebuilt.err;
  EXPECT_EQ(read("b.json")["blocks"][0]["seconds"], read("b.json")["blocks"][1]["seconds"]);
}

TEST_F(PlanProgram, NoPlanReachesFurtherThanTheLinks) {
  const std::string reach = "8192 devices: the links of a100 reach 4096";
  EXPECT_THAT(complaint_of("plan block --hardware a100 --seq 16K --schemes ring:8192"), HasSubstr(reach));
  EXPECT_THAT(complaint_of("plan train --hardware a100 --devices 8192"), HasSubstr(reach));
}

TEST_F(PlanProgram, PlansSayWhatWasNotMeasuredAndWhatWasAssumed) {
  const auto block = run_isomer(fmt::format("plan block --hardware ascend-910b --json {}", path("block.json")));
  EXPECT_THAT(block.out, HasSubstr("efficiencies not measured on this device"));
  EXPECT_EQ(read("block.json")["hardware_fitted"], false);
  const std::string decode =
      "plan decode --model deepseek-v2-lite --hardware a100 --max-devices 8 --batch 1,8 --no-sensitivity --json " +
      path("decode.json");
  const auto usual = run_isomer(decode + " --context 4K");
  ASSERT_EQ(usual.exit_code, 0) << usual.err;
  EXPECT_EQ(usual.out.find("assumed:"), std::string::npos);
  EXPECT_EQ(usual.out.find("note:"), std::string::npos);
  EXPECT_EQ(read("decode.json")["memory_limit_bytes"], 80e9);
  EXPECT_TRUE(read("decode.json")["assumptions"]["link_latency_s"].is_null());
  const auto other = run_isomer(decode + " --context 1M --memory 60GB --link-latency 5us --link-bandwidth 150GB/s");
  ASSERT_EQ(other.exit_code, 0) << other.err;
  EXPECT_THAT(other.out, HasSubstr("assumed: memory of a device 60.0 GB, link latency 5.0 us, 0.5 times the links'"));
  EXPECT_THAT(other.out, HasSubstr("note: positions up to 1048576 lie beyond the model's 163840"));
  EXPECT_EQ(read("decode.json")["memory_limit_bytes"], 60e9);
  EXPECT_NEAR(read("decode.json")["assumptions"]["link_latency_s"].get<double>(), 5e-6, 1e-12);
  EXPECT_EQ(read("decode.json")["assumptions"]["link_bandwidth_factor"], 0.5);
}

TEST_F(PlanProgram, RefusalsNameTheNearestThatCanBe) {
  // 63 = 7 · 9 is nearer to 64 than 70.
  EXPECT_THAT(complaint_of("plan train --model minicpm3 --devices 7 --seq 16K"),
              HasSubstr("the nearest that divides: 63 sequences a step"));
  const std::string decode = "plan decode --model deepseek-r1 --hardware h200 --nodes 4 --precision fp8 --context 4K ";
  EXPECT_THAT(complaint_of(decode + "--layouts dp-ep:3"), HasSubstr("; dp-ep:3: ep=3: 256 experts can't be spread"));
  EXPECT_THAT(complaint_of(decode + "--layouts tp:7"), HasSubstr("; tp:7: 128 heads can't be spread over 7 ranks"));
  EXPECT_THAT(complaint_of(decode + "--layouts tp:8,pp:2 --batch 7"), HasSubstr("take batches that 2 divides"));
  EXPECT_THAT(complaint_of(decode + "--layouts 'kvp:8;kvp:8'"), HasSubstr("kvp:8 is named twice"));
}

TEST_F(PlanProgram, RangesLieAroundWhatTheUserAssumes) {
  const std::string decode =
      "plan decode --model deepseek-r1 --hardware gb200-nvl72 --context 64K --max-devices 8 "
      "--precision fp4 --batch 8,8,64 --link-latency 60us --json " +
      path("decode.json");
  ASSERT_EQ(run_isomer(decode).exit_code, 0);
  const json plan = read("decode.json");
  for (const json& row : plan["sensitivity"]["rows"]) {
    if (row["assumption"] != "link latency") continue;
    EXPECT_EQ(row["ends"][0]["value"], "20 us");
    EXPECT_EQ(row["ends"][1]["value"], "180 us");
    return;
  }
  FAIL() << plan["sensitivity"].dump(1);
}

TEST_F(PlanProgram, HardwareWithoutCurvesIsNotSaidToBeChecked) {
  const auto check = run_isomer(
      fmt::format("plan validate --table {} --hardware ascend-910b --json {}", path("table.csv"), path("check.json")));
  EXPECT_EQ(check.exit_code, 1);
  EXPECT_THAT(check.out, HasSubstr("Nothing was checked: ascend-910b has no curve fitted"));
  EXPECT_EQ(check.out.find("within its aim"), std::string::npos);
  EXPECT_EQ(read("check.json")["systems"][0]["checked"], false);
}

TEST_F(PlanProgram, TimesInAnotherUnitAreDoubted) {
  std::string text = table();
  for (const auto& [name, factor] : {std::pair{"micro.csv", 1e6}, std::pair{"small.csv", 1e-6}}) {
    std::string scaled;
    for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string line = text.substr(begin, end - begin);
      const auto comma = line.rfind(',') + 1;
      scaled += begin == 0 ? line + "\n"
                           : fmt::format("{}{:.9g}\n", line.substr(0, comma),
                                         std::max(1e-9, factor * std::stod(line.substr(comma))));
    }
    std::ofstream(path(name)) << scaled;
    const auto fit = run_isomer(fmt::format("plan fit --table {} --hardware a100 --out {} --json {}", path(name),
                                            path("odd.json"), path("odd.out")));
    ASSERT_EQ(fit.exit_code, 0) << fit.err;
    EXPECT_THAT(fit.out, HasSubstr(factor > 1 ? "not milliseconds or microseconds" : "quicker than a100 allows"))
        << name;
    EXPECT_THAT(fit.out, HasSubstr("the column takes seconds of one execution"));
    EXPECT_FALSE(read("odd.out")["warnings"].empty());
    EXPECT_THAT(run_isomer(fmt::format("plan validate --table {} --hardware {}", path(name), path("odd.json"))).out,
                HasSubstr("the first: row"));
  }
  const auto right = run_isomer(fmt::format("plan fit --table {} --hardware a100 --out {} --json {}", path("table.csv"),
                                            path("right.json"), path("right.out")));
  EXPECT_EQ(right.out.find("warning"), std::string::npos) << right.out;
  EXPECT_TRUE(read("right.out")["warnings"].empty());
}

TEST_F(PlanProgram, NamesThatThereAreNotHaveNearOnes) {
  EXPECT_THAT(complaint_of("pln"), HasSubstr("'pln' is no subcommand; did you mean plan? there are: compare, "));
  EXPECT_THAT(complaint_of("plan decod --context 4K"),
              HasSubstr("'decod' is no subcommand of isomer plan; did you mean decode? there are: decode, train, "));
  EXPECT_THAT(complaint_of("plan"), HasSubstr("a subcommand is required; there are: decode, "));
  EXPECT_THAT(complaint_of("plan decode --modle deepseek-r1"),
              HasSubstr("there is no option '--modle'; did you mean --model? (isomer plan decode --help"));
  EXPECT_THAT(complaint_of("plan decode --contxt=4K"), HasSubstr("no option '--contxt'; did you mean --context?"));
  EXPECT_THAT(complaint_of("plan fit --ot x.json"), HasSubstr("no option '--ot'; did you mean --out?"));
  EXPECT_THAT(complaint_of("compare --zzzzzzzzz 3"), HasSubstr("there is no option '--zzzzzzzzz' (isomer compare"));
  EXPECT_THAT(complaint_of("plan decode --context 4K --context 8K"),
              HasSubstr("--context is given twice; give it once"));
  EXPECT_THAT(complaint_of("plan decode --json a --json b --json c"), HasSubstr("--json is given 3 times; give it"));
}

TEST_F(PlanProgram, WhatOnlyTryingTellsIsTriedBeforeTheWork) {
  for (const char* option : {"--json", "--html"}) {
    const auto result = run_isomer(fmt::format("plan decode {} /proc/x", option));
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, HasSubstr("/proc/x: can't be written: no file can be made in '/proc'"));
    EXPECT_EQ(result.out, "") << "told before the search";
  }
  const auto full = run_isomer("plan block --json /dev/full");
  EXPECT_EQ(full.exit_code, 2) << "opens, and takes nothing";
  EXPECT_THAT(full.err, HasSubstr("--json /dev/full: can't be written: No space left on device"));
  EXPECT_EQ(run_isomer(fmt::format("plan block --json {}", path("made.json"))).exit_code, 0);
  for (const auto& entry : std::filesystem::directory_iterator(path(""))) {
    EXPECT_EQ(entry.path().filename().string().find(".isomer-"), std::string::npos) << "nothing stays behind";
  }
}

}  // namespace
}  // namespace isomer::testing
