// Decoding in processes: the bits of threads, under every exact layout.
#include <gmock/gmock.h>

#include "comm/group.h"
#include "full_tests.h"
#include "infer/model_folder.h"

namespace isomer {
namespace {

using testing::ModelFolder;
using testing::run_isomer;
using testing::text_of;

bool can_start_mpirun() { return mpi_available() && std::system("mpirun --version > /dev/null 2>&1") == 0; }

TEST(MpiDecode, LogitsAreTheBitsOfThreads) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  const int count = testing::full_tests() ? 320 : 24;
  std::string ids;
  for (int i = 0; i < count; ++i) ids += fmt::format("{} ", (i * 37 + i / 7) % 400);
  f.write("ids.txt", ids);
  std::vector<std::string> layouts = {"exact-latent:2", "helix:kvp=2,tpa=1"};
  if (testing::full_tests())
    layouts.insert(layouts.end(),
                   {"tp:1", "tp:2", "tp:4", "kvp:2", "kvp:4", "exact-latent:4", "medha:kvp=2,tpa=2",
                    "helix:kvp=4,tpa=1,tpf=2,ep=2,q=gather", "helix:kvp=2,tpa=2,tpf=1,ep=4,experts=gather",
                    "helix:kvp=3,tpa=1,tpf=3,wuv=before,hopb=off"});
  for (const std::string& layout : layouts) {
    for (const std::string backend : {"threads", "mpi"}) {
      const auto result = run_isomer(
          fmt::format("eval logits --model {} --ids {} --mode decode --prefix {} --layout {} --backend {} --out {}",
                      f.at("model"), f.at("ids.txt"), count / 2, layout, backend, f.at(backend)));
      ASSERT_EQ(result.exit_code, 0) << layout << " " << result.err;
    }
    EXPECT_TRUE(text_of(f.path() / "mpi") == text_of(f.path() / "threads")) << layout;
  }
}

TEST(MpiDecode, DivergenceIsThatOfThreads) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  std::string ids;
  for (int i = 0; i < 60; ++i) ids += fmt::format("{} ", (i * 37 + i / 7) % 400);
  f.write("ids.txt", ids);
  std::vector<nlohmann::json> found;
  for (const std::string backend : {"threads", "mpi"}) {
    const auto result = run_isomer(
        fmt::format("eval kl --base {0} --model {0} --layout gla:2 --ids {1} --window 32 --backend {2} --json {3}",
                    f.at("model"), f.at("ids.txt"), backend, f.at("kl.json")));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const std::string printed = result.out;
    EXPECT_EQ(printed.find("same most probable token"), printed.rfind("same most probable token")) << printed;
    found.push_back(nlohmann::json::parse(text_of(f.path() / "kl.json")));
  }
  EXPECT_GT(found[0]["mean_kl"].get<double>(), 1e-6);
  for (const char* key : {"mean_kl", "largest_kl", "nats_per_token", "tokens_scored"}) {
    EXPECT_EQ(found[0][key], found[1][key]) << key;
  }
}

TEST(MpiDecode, GeneratesTheTextOfThreadsWithPrefillApart) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  const std::string command = fmt::format(
      "generate --model {} --prompt 'It is' --prompt 'a truth universally' --tokens 12 --temperature 1 --top-p 0.9 "
      "--seed 5 --ignore-eos ",
      f.at("model"));
  const auto threads = run_isomer(command + "--layout tp:2");
  ASSERT_EQ(threads.exit_code, 0) << threads.err;
  for (const std::string options : {"--layout tp:2", "--prefill-layout tp:1 --layout tp:2"}) {
    const auto mpi = run_isomer(command + options + " --backend mpi");
    EXPECT_EQ(mpi.exit_code, 0) << mpi.err;
    EXPECT_EQ(mpi.out, threads.out) << options;
    EXPECT_THAT(mpi.err, ::testing::HasSubstr("ranks (mpi)"));
  }
  const auto refused = run_isomer(command + "--layout tp:3 --backend mpi");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("16 heads can't be spread over 3 ranks"));
}

}  // namespace
}  // namespace isomer
