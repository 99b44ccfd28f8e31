// The MPI backend, driven from here: the suite in mpirun's processes, compared bit for bit with threads, and failures.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <thread>

#include "comm/suite.h"

namespace isomer {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool can_start_mpirun() { return mpi_available() && std::system("mpirun --version > /dev/null 2>&1") == 0; }

class Mpi : public testing::Test {
 protected:
  void SetUp() override {
    if (under_mpirun()) GTEST_SKIP() << "inside mpirun already";
    if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
    folder_ = fs::temp_directory_path() / fmt::format("isomer-mpi-test-{}", getpid());
    fs::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  struct Outcome {
    int exit_code = -1;
    double seconds = 0;
    std::string output;
  };

  /// Starts this program again, under mpirun if num_ranks > 0.
  Outcome start(int num_ranks, const std::string& filter, const std::vector<std::string>& environment) {
    const fs::path output = folder_ / "output";
    const double begin_s = wall_clock_s();
    const pid_t child = fork();
    if (child == 0) {
      become(num_ranks, filter, environment, output);
      _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, wall_clock_s() - begin_s, read_file(output)};
  }

  Outcome scenario(int num_ranks, const std::string& name) {
    return start(num_ranks, "MpiProcess.Scenario", {"ISOMER_COMM_SCENARIO=" + name});
  }

  fs::path folder_;

 private:
  static void become(int num_ranks, const std::string& filter, const std::vector<std::string>& environment,
                     const fs::path& output) {
    if (std::freopen(output.c_str(), "w", stdout) == nullptr || dup2(fileno(stdout), STDERR_FILENO) < 0) return;
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0);  // Open MPI keeps what it allocates
    for (const auto& entry : environment) {
      const auto equals = entry.find('=');
      setenv(entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str(), 1);
    }
    std::string program = fs::read_symlink("/proc/self/exe");
    std::string option = "--gtest_filter=" + filter;
    std::string plain = "--gtest_color=no";
    char* words[] = {program.data(), option.data(), plain.data(), nullptr};
    try {
      if (num_ranks > 0) relaunch_under_mpirun({.backend = Backend::mpi, .num_ranks = num_ranks}, 3, words);
      execv(words[0], words);
    } catch (const std::exception& error) {
      fmt::print("{}\n", error.what());
    }
  }
};

TEST_F(Mpi, GivesTheSameBitsAsThreads) {
  for (int num_ranks : {2, 4}) {
    const std::string filter = fmt::format("Collectives/*/P{0}:Comm/*/P{0}", num_ranks);
    const fs::path threads = folder_ / fmt::format("threads{}", num_ranks);
    const fs::path processes = folder_ / fmt::format("processes{}", num_ranks);
    fs::create_directories(threads);
    fs::create_directories(processes);
    const auto by_threads = start(0, filter, {"ISOMER_COMM_RESULTS=" + threads.string()});
    ASSERT_EQ(by_threads.exit_code, 0) << by_threads.output;
    const auto by_processes = start(num_ranks, filter, {"ISOMER_COMM_RESULTS=" + processes.string()});
    ASSERT_EQ(by_processes.exit_code, 0) << by_processes.output;
    EXPECT_THAT(by_processes.output, HasSubstr("[  PASSED  ]"));
    EXPECT_EQ(by_processes.output.find("SKIPPED"), std::string::npos) << by_processes.output;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto name = fmt::format("P{}-rank{}", num_ranks, rank);
      const auto expected = read_file(threads / name);
      ASSERT_GT(expected.size(), 10'000u);
      EXPECT_TRUE(read_file(processes / name) == expected) << name;
    }
  }
}

TEST_F(Mpi, ClocksAndTheEmulatedLinkAreThoseOfThreads) {
  const auto outcome = start(2, "Clock.AllReduce*:Clock.Async*:Clock.Without*:Link.AnEmulated*", {});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

void expect_end(int exit_code, double seconds, const std::string& output, const std::string& text) {
  EXPECT_NE(exit_code, 0) << output;
  EXPECT_LT(seconds, 10) << output;
  EXPECT_THAT(output, HasSubstr(text));
}

TEST_F(Mpi, EveryFailureEndsTheWorldWithItsName) {
  const std::pair<const char*, const char*> kScenarios[] = {
      {"throw", "error: rank 1: boom"},
      {"mistake", "error: heads = 5"},
      {"leave", "all_gather 'q' (setup): rank 1 left"},
      {"other collective", "instead"},
      {"other size", "bytes, "},
      {"stall",
       "all_gather 'q' (setup): rank 1 showed no sign of life for 1 s (its last call was all_gather 'q' (setup))"},
      {"kill", "signal 9"},
  };
  for (const auto& [name, text] : kScenarios) {
    SCOPED_TRACE(name);
    const auto outcome = scenario(3, name);
    expect_end(outcome.exit_code, outcome.seconds, outcome.output, text);
    // The launcher names the lost rank; the others say what they were in.
    const bool killed = name == std::string("kill");
    EXPECT_EQ(outcome.output.find(" died ") != std::string::npos, killed) << outcome.output;
    if (killed) {
      EXPECT_THAT(outcome.output, HasSubstr("its last call was all_gather 'q' (setup)"));
      EXPECT_THAT(outcome.output, HasSubstr("error: rank 1 died after all_gather 'q' (setup)\n"));
    }
  }
}

TEST_F(Mpi, AWorkingRankIsWaitedForAndAWrongWorldRefused) {
  const auto slow = scenario(3, "slow");
  EXPECT_EQ(slow.exit_code, 0) << slow.output;
  const auto wrong = scenario(2, "wrong world");
  EXPECT_THAT(wrong.output, HasSubstr("ranks = 3: this process is in an MPI world of 2"));
}

void gather(RankContext& ctx, std::int64_t count) {
  Tensor mine = ctx.zeros("q", MemoryClass::workspace, DType::f32, {count});
  std::vector<Tensor> receive;
  for (int peer = 0; peer < ctx.world_size(); ++peer) receive.push_back(make(ctx, "q", DType::f32, {count}));
  ctx.comm().all_gather("q", mine, receive);
}

/// What rank 1 does before the others' all_gather; true if it still takes part.
bool misbehave(RankContext& ctx, const std::string& scenario) {
  if (scenario == "throw") throw std::runtime_error("boom");
  if (scenario == "leave") return false;
  if (scenario == "kill") std::raise(SIGKILL);
  if (scenario == "stall") std::this_thread::sleep_for(std::chrono::seconds(30));
  if (scenario == "other collective") ctx.comm().barrier();
  for (int step = 0; scenario == "slow" && step < 50; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    ctx.heartbeat().fetch_add(1);
  }
  return true;
}

// One process of a scenario above; nothing on its own.
TEST(MpiProcess, Scenario) {
  const char* name = std::getenv("ISOMER_COMM_SCENARIO");
  if (name == nullptr) return;
  const std::string scenario = name;
  auto options = suite_options(3);
  options.timeout_s = 1;
  run_group(options, [&](RankContext& ctx) {
    gather(ctx, 4);
    if (scenario == "mistake") invalid_argument("heads = 5");
    if (ctx.rank() == 1 && !misbehave(ctx, scenario)) return;
    gather(ctx, ctx.rank() == 1 && scenario == "other size" ? 5 : 4);
  });
}

}  // namespace
}  // namespace isomer
