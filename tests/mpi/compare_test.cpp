// `isomer compare` under Open MPI gives the bits and the bytes that it gives on threads, for every scheme.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "comm/group.h"
#include "full_tests.h"
#include "study/program.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::run_isomer;

bool can_start_mpirun() { return mpi_available() && std::system("mpirun --version > /dev/null 2>&1") == 0; }

/// Paths of all files below `directory`, relative to it.
std::vector<std::string> files_below(const fs::path& directory) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), directory).string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Everything that counts bytes or calls, per scheme and rank.
json accounts_of(const json& report) {
  json accounts = json::array();
  for (const auto& scheme : report.at("schemes")) {
    json account;
    for (const char* key : {"layout", "bytes_sent_per_rank", "bytes_predicted_per_rank", "bytes_agree",
                            "gradient_sync_bytes_sent_per_rank", "peak_activation_bytes", "peak_agrees",
                            "max_abs_error", "max_grad_rel_error", "within_bound"}) {
      account[key] = scheme.at(key);
    }
    for (const auto& rank : scheme.at("ranks")) {
      json row;
      for (const char* key : {"rank", "bytes_sent", "bytes_received", "bytes_sent_by_collective", "messages",
                              "peak_activation_bytes", "saved_bytes", "flops"}) {
        row[key] = rank.at(key);
      }
      account["ranks"].push_back(row);
    }
    accounts.push_back(account);
  }
  return accounts;
}

struct Case {
  int ranks;
  const char* dtype;
  const char* attention;
  bool everyday;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.ranks << " ranks, " << c.dtype << ", " << c.attention; }

/// Eager cores run the five schemes that spread heads; fused ones three more, and four ranks make three layouts of two
/// axes.
int num_layouts(const Case& c) {
  if (std::string(c.attention) == "eager") return 5;
  return c.ranks == 4 ? 11 : 8;
}

class MpiCompare : public ::testing::TestWithParam<Case> {};

TEST_P(MpiCompare, GivesTheBitsOfThreads) {
  const Case& c = GetParam();
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  if (!c.everyday && !testing::full_tests()) GTEST_SKIP() << "with ISOMER_FULL_TESTS only";
  const TempFolder folder;
  // 61 tokens leave every shard uneven.
  for (const char* backend : {"threads", "mpi"}) {
    const auto result = run_isomer(fmt::format(
        "compare --model tiny-mla --seq 61 --batch 2 --first-position 900 --ranks {} --dtype {} --attention {} "
        "--backend {} --dump {} --json {}",
        c.ranks, c.dtype, c.attention, backend, (folder.path() / backend).string(),
        (folder.path() / fmt::format("{}.json", backend)).string()));
    ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  }
  const fs::path threads = folder.path() / "threads", mpi = folder.path() / "mpi";
  const auto files = files_below(threads);
  EXPECT_EQ(files.size(),
            static_cast<std::size_t>(3 + num_layouts(c) * (c.ranks + 1) + 1));  // shared, README, read.py
  EXPECT_EQ(files_below(mpi), files);
  for (const std::string& file : files) {
    EXPECT_TRUE(testing::text_of(threads / file) == testing::text_of(mpi / file)) << file;
  }
  const auto report_of = [&](const std::string& name) { return json::parse(testing::text_of(folder.path() / name)); };
  EXPECT_EQ(report_of("mpi.json").at("backend"), "mpi");
  EXPECT_EQ(accounts_of(report_of("mpi.json")), accounts_of(report_of("threads.json")));
}

INSTANTIATE_TEST_SUITE_P(Grid, MpiCompare,
                         ::testing::Values(Case{2, "f32", "fused", true}, Case{4, "bf16", "fused", true},
                                           Case{2, "bf16", "eager", true}, Case{4, "f32", "fused", true},
                                           Case{4, "f32", "eager", false}, Case{2, "f32", "eager", false},
                                           Case{2, "bf16", "fused", false}, Case{4, "bf16", "eager", false}),
                         [](const auto& test) {
                           return fmt::format("P{}_{}_{}", test.param.ranks, test.param.dtype, test.param.attention);
                         });

TEST(MpiCompareErrors, AreRefusedBeforeProcessesStart) {
  if (!mpi_available()) GTEST_SKIP() << "no MPI in this build";
  const auto result = run_isomer("compare --model tiny-mla --backend mpi --ranks 2 --json /nowhere/at/all.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

}  // namespace
}  // namespace isomer
