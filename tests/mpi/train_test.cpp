// `isomer train` under Open MPI: the losses and weights of threads bit for bit, and an end when a rank is lost.
#include <gmock/gmock.h>

#include "mpi/rank_processes.h"
#include "train/killed_process.h"
#include "train/program_fixture.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::can_start_mpirun;
using testing::losses_in;
using testing::Process;
using testing::ranks_of;
using testing::run_isomer;
using testing::text_of;
using testing::TrainFolder;

TEST(MpiTrain, GivesTheBitsOfThreads) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const TrainFolder f;
  for (const std::string layout : {"laga:2,dp:2", "latent-ring:2"}) {
    const std::string name = layout.substr(0, 4);
    for (const std::string backend : {"threads", "mpi"}) {
      const auto result =
          run_isomer(f.train(name + backend, fmt::format("--layout {} --backend {} --steps 3 --json {}/{}.json", layout,
                                                         backend, f.at(), backend)));
      ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    }
    const fs::path threads = f.path() / (name + "threads"), mpi = f.path() / (name + "mpi");
    EXPECT_EQ(losses_in(threads).size(), 3u);
    EXPECT_EQ(losses_in(mpi), losses_in(threads));
    for (const char* file : {"model.safetensors", "latest/optimizer.safetensors"}) {
      EXPECT_TRUE(text_of(mpi / file) == text_of(threads / file)) << file;
    }
    const auto account = [&](const std::string& backend) {
      return nlohmann::json::parse(text_of(f.path() / (backend + ".json"))).at("accounts").at(0);
    };
    EXPECT_EQ(account("mpi"), account("threads"));
  }
  // On with threads what MPI began.
  const auto resumed = run_isomer(fmt::format("train --resume {}/lagampi", f.at()));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
}

TEST(MpiTrain, ALostRankEndsAllOfThem) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const TrainFolder f;
  for (const int victim : {1, 0}) {
    const std::string name = fmt::format("lost{}", victim), output = f.at() + "/" + name + ".out";
    Process process(
        testing::words_of(f.train(name, "--layout laga:2,dp:2 --backend mpi --steps 100000 --save-every 2")), output);
    const fs::path run = f.path() / name;
    for (int i = 0; i < 6000 && !process.has_ended() && !fs::exists(run / "latest"); ++i) testing::sleep_ms(10);
    const auto ranks = ranks_of(run.string());
    ASSERT_EQ(ranks.size(), 4u) << text_of(output);
    ::kill(ranks.at(victim), SIGKILL);
    const double begin_s = wall_clock_s();
    const int code = process.wait();
    EXPECT_LT(wall_clock_s() - begin_s, 10);
    EXPECT_NE(code, 0);
    EXPECT_THAT(text_of(output), ::testing::HasSubstr("signal 9"));
    EXPECT_THAT(text_of(output), ::testing::ContainsRegex(fmt::format("error: rank {} died (in|after) ", victim)));
    for (int i = 0; i < 100 && !ranks_of(run.string()).empty(); ++i) testing::sleep_ms(20);
    EXPECT_TRUE(ranks_of(run.string()).empty()) << "processes are left";
    const auto next = RunDirectory(run).latest_step() + 1;
    const auto resumed = run_isomer(fmt::format("train --resume {} --stop-at {}", run.string(), next));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  }
}

}  // namespace
}  // namespace isomer
