// Decoding in processes: the bits of threads, under every exact layout.
#include <gmock/gmock.h>

#include <iterator>
#include <optional>
#include <sstream>

#include "full_tests.h"
#include "infer/model_folder.h"
#include "mpi/rank_processes.h"
#include "train/killed_process.h"

namespace isomer {
namespace {

using testing::can_start_mpirun;
using testing::ModelFolder;
using testing::Process;
using testing::ranks_of;
using testing::run_isomer;
using testing::text_of;

TEST(MpiDecode, LogitsAreTheBitsOfThreads) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  const int count = testing::full_tests() ? 320 : 24;
  std::string ids;
  for (int i = 0; i < count; ++i) ids += fmt::format("{} ", (i * 37 + i / 7) % 400);
  f.write("ids.txt", ids);
  std::vector<std::string> layouts = {"exact-latent:2", "helix:kvp=2,tpa=1,q=gather",
                                      "helix:kvp=2,tpa=2,tpf=1,ep=4,experts=gather", "dp-ep:2"};
  if (testing::full_tests())
    layouts.insert(layouts.end(),
                   {"tp:1", "tp:2", "tp:4", "kvp:2", "kvp:4", "exact-latent:4", "medha:kvp=2,tpa=2",
                    "helix:kvp=4,tpa=1,tpf=2,ep=2,q=gather", "helix:kvp=3,tpa=1,tpf=3,wuv=before,hopb=off"});
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

/// A run of `generate` under helix in mid-decode, whose ranks get a signal.
class DecodeUnderWay {
 public:
  DecodeUnderWay(const ModelFolder& folder, const std::string& options)
      : model_(folder.at("model")), output_(folder.at("output")) {
    process_.emplace(
        words_of("generate --model", model_, "--prompt truth --tokens 390 --ignore-eos --backend mpi " + options),
        output_);
    // The text comes as it is decoded.
    for (int i = 0; i < 6000 && !process_->has_ended() && text_of(output_).size() < 20; ++i) testing::sleep_ms(10);
    ranks_ = ranks_of(model_);
  }
  const std::map<int, pid_t>& ranks() const { return ranks_; }
  std::string output() const { return text_of(output_); }
  /// Signals a rank, waits for the end of the run and of all its processes. Returns the program's exit code.
  int end_by(int victim, int signal, double seconds) {
    const double begin_s = wall_clock_s();
    ::kill(ranks_.at(victim), signal);
    const int code = process_->wait();
    EXPECT_LT(wall_clock_s() - begin_s, seconds) << output();
    for (int i = 0; i < 500 && !ranks_of(model_).empty(); ++i) testing::sleep_ms(20);
    EXPECT_TRUE(ranks_of(model_).empty()) << "processes are left";
    return code;
  }

 private:
  static std::vector<std::string> words_of(const std::string& head, const std::string& model, const std::string& rest) {
    std::istringstream stream(head + " " + model + " " + rest);
    return {std::istream_iterator<std::string>(stream), std::istream_iterator<std::string>()};
  }
  std::string model_, output_;
  std::optional<Process> process_;
  std::map<int, pid_t> ranks_;
};

TEST(MpiDecode, ALostRankEndsAllOfThem) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  DecodeUnderWay run(f, "--layout helix:kvp=2,tpa=1,tpf=2");
  ASSERT_EQ(run.ranks().size(), 2u) << run.output();
  EXPECT_NE(run.end_by(1, SIGKILL, 10), 0);
  EXPECT_THAT(run.output(), ::testing::HasSubstr("signal 9"));
  // Isomer's own word, and no other rank is blamed.
  EXPECT_THAT(run.output(), ::testing::ContainsRegex("error: rank 1 died (in|after) [a-z_]+ '[^']+' \\(forward\\)\n"));
  EXPECT_THAT(run.output(), ::testing::Not(::testing::HasSubstr("rank 0 died")));
}

TEST(MpiDecode, AStalledRankEndsAllOfThem) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  DecodeUnderWay run(f, "--layout helix:kvp=2,tpa=1,tpf=2 --timeout 2");
  ASSERT_EQ(run.ranks().size(), 2u) << run.output();
  EXPECT_NE(run.end_by(1, SIGSTOP, 15), 0);
  EXPECT_THAT(run.output(), ::testing::ContainsRegex("rank 0: [a-z_]+ '[^']+' \\(forward\\): rank 1 showed no sign of "
                                                     "life for 2 s \\((it waits in|its last call was) [a-z_]+ '[^']+' "
                                                     "\\(forward\\)\\)"));
}

/// compare works out its reference at rank 0 alone, long before the ranks decode: a rank stopped then is noticed by the
/// launcher alone.
TEST(MpiDecode, ARankThatStandsStillBeforeTheRanksMeetEndsAllOfThem) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  const std::string output = f.at("output");
  // Two million cached tokens take rank 0 far longer than the timeout.
  Process process({"compare", "--phase", "decode", "--model", f.at("model"), "--backend", "mpi", "--ranks", "2",
                   "--layouts", "helix:kvp=2,tpa=1", "--context", "64K", "--batch", "32", "--timeout", "1"},
                  output);
  std::map<int, pid_t> ranks;
  for (int i = 0; i < 1000 && ranks.size() < 2; ++i) {
    testing::sleep_ms(10);
    ranks = ranks_of(f.at("model"));
  }
  ASSERT_EQ(ranks.size(), 2u) << text_of(output);
  testing::sleep_ms(500);
  ::kill(ranks.at(0), SIGSTOP);
  const double begin_s = wall_clock_s();
  EXPECT_NE(process.wait(), 0);
  EXPECT_LT(wall_clock_s() - begin_s, 12) << text_of(output);
  EXPECT_THAT(text_of(output), ::testing::ContainsRegex("error: rank 0: its process has stood still for 4[.0-9]* s|"
                                                        "rank 0 showed no sign of life for 1 s"));
  for (int i = 0; i < 500 && !ranks_of(f.at("model")).empty(); ++i) testing::sleep_ms(20);
  EXPECT_TRUE(ranks_of(f.at("model")).empty()) << "processes are left";
}

TEST(MpiDecode, ComparesAsBetweenThreadsWithOneReference) {
  if (!can_start_mpirun()) GTEST_SKIP() << "no MPI in this build, or no mpirun on this machine";
  const ModelFolder f;
  std::vector<nlohmann::json> found;
  for (const std::string backend : {"threads", "mpi"}) {
    const auto result = run_isomer(
        fmt::format("compare --phase decode --model {} --context 50 --batch 2 --tokens 3 --ranks 2 --backend {} "
                    "--layouts 'tp:2;helix:kvp=2,tpa=1' --json {}",
                    f.at("model"), backend, f.at("out.json")));
    ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    found.push_back(nlohmann::json::parse(text_of(f.path() / "out.json")));
  }
  for (const char* key : {"max_logit_error", "bound", "bytes_sent_per_rank_per_token", "within_bound"}) {
    for (const int layout : {0, 1}) {
      EXPECT_EQ(found[0]["layouts"][layout][key], found[1]["layouts"][layout][key]) << key;
    }
  }
}

}  // namespace
}  // namespace isomer
