// isomer train, as a user runs it: refusals in one line that leave nothing behind, Ctrl-C, kill -9, --resume.
#include <gmock/gmock.h>

#include <random>

#include "full_tests.h"
#include "model/checkpoint.h"
#include "train/killed_process.h"
#include "train/program_fixture.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::losses_in;
using testing::Process;
using testing::run_isomer;
using testing::text_of;
using testing::TrainFolder;
using testing::words_of;

const TrainFolder& shared_folder() {
  static const TrainFolder folder;
  return folder;
}

TEST(TrainProgram, TrainsAModelThatOpens) {
  const TrainFolder& f = shared_folder();
  const auto result = run_isomer(f.train("first", fmt::format("--steps 6 --layout laga:2 --eval-data {0}/text.txt "
                                                              "--eval-sequences 5 --json {0}/first.json",
                                                              f.at())));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("the model is in"));
  const fs::path run = f.path() / "first";
  EXPECT_EQ(losses_in(run).size(), 6u);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "run.json"}) {
    EXPECT_TRUE(fs::exists(run / name)) << name;
  }
  auto config = nlohmann::json::parse(text_of(f.path() / "model" / "config.json"));
  config["torch_dtype"] = "float32";  // what the weights are in
  EXPECT_EQ(nlohmann::json::parse(text_of(run / "config.json")), config);
  EXPECT_EQ(text_of(run / "tokenizer.json"), text_of(f.path() / "tok" / "tokenizer.json"));
  EXPECT_EQ(run_isomer(fmt::format("inspect {}", run.string())).exit_code, 0);
  const auto json = nlohmann::json::parse(text_of(f.path() / "first.json"));
  EXPECT_EQ(json["accounts"].size(), 2u);
  EXPECT_GT(json["accounts"][0]["bytes_sent"]["forward"], 0);
  EXPECT_EQ(json["steps"], 6);
}

struct Refusal {
  std::string arguments, message;
};

/// The run that would succeed with these options, and one thing wrong with it.
void expect_refusal(const TrainFolder& f, const std::string& arguments, const std::string& message) {
  SCOPED_TRACE(arguments);
  const auto result = run_isomer(arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr(message));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_FALSE(fs::exists(f.path() / "bad")) << "something is left behind";
  EXPECT_FALSE(fs::exists(f.path() / ".bad.unfinished")) << "something is left behind";
}

TEST(TrainProgram, RefusesBadOptionsInOneLine) {
  const TrainFolder& f = shared_folder();
  const std::string at = f.at();
  const auto good = [&](const std::string& more) { return f.train("bad", more); };
  expect_refusal(f, "train --steps 2", "--data: name the text");
  expect_refusal(f, fmt::format("train --data {0}/text.txt --out {0}/bad", at), "--config: name a model");
  expect_refusal(f, fmt::format("train --config {0}/model --out {0}/bad", at), "--data: name the text");
  expect_refusal(f, fmt::format("train --config {0}/model --data {0}/text.txt", at), "--out: name the directory");
  expect_refusal(f, good("--layout lago:2"), "lago");
  expect_refusal(f, good("--layout laga:5"), "5 ranks don't divide 24 heads");
  expect_refusal(f, good("--layout laga:2 --ranks 3"), "");
  expect_refusal(f, good("--layout laga:1,dp:3"), "--batch 4: 3 data-parallel replicas don't divide it; take 3 or 6");
  expect_refusal(f, good("--layout dp:2"),
                 "layout 'dp:2': dp is an axis beside a scheme, which stands first: explicit:1,dp:2");
  expect_refusal(f, good("--layout ''"), "--layout: it is empty");
  expect_refusal(f, good("--steps 5 --stop-at 6"), "--stop-at 6: the run's schedule has 5 steps");
  expect_refusal(f, good("--tokenizer " + at + "/none"), "none: there is no such file or directory");
  expect_refusal(f, good("--micro-batch 3"), "--micro-batch 3");
  expect_refusal(f, good("--steps 0"), "--steps 0: it takes 1 to");
  expect_refusal(f, good("--steps 5 --warmup 6"), "--warmup 6: it takes 0 to 5");
  expect_refusal(f, good("--learning-rate -1"), "--learning-rate -1: it takes");
  expect_refusal(f, good("--init-std nan"), "--init-std nan");
  expect_refusal(f, good("--seed x"), "x");
  expect_refusal(f, good("--json /nowhere/at/all.json"), "/nowhere/at");
  expect_refusal(f, fmt::format("train --config {0}/model --data {0}/text.txt --seq 65 --out {0}/bad", at),
                 "--seq 65: 'model' is made for positions up to 64");
  expect_refusal(f, fmt::format("train --config tiny-mla --data {0}/text.txt --out {0}/bad", at),
                 "no tokenizer.json comes with 'tiny-mla'");
  expect_refusal(f, fmt::format("train --config {0}/nothing --data {0}/text.txt --out {0}/bad", at), "nothing");
}

TEST(TrainProgram, RefusesBadInputAndLeavesNothingBehind) {
  const TrainFolder& f = shared_folder();
  const std::string at = f.at();
  const auto with_data = [&](const std::string& data, const std::string& more = {}) {
    return fmt::format("train --config {0}/model --data {0}/{1} --seq 24 --batch 4 --steps 3 --out {0}/bad {2}", at,
                       data, more);
  };
  f.write("latin.txt", std::string(2000, 'a') + "\xe9" + std::string(100, 'b'));
  f.write("short.txt", "too short");
  f.write("empty.txt", "");
  expect_refusal(f, with_data("none.txt"), "none.txt: there is no such file");
  expect_refusal(f, with_data("tok"), "tok: it is a directory; name its text files");
  expect_refusal(f, with_data("latin.txt"), "latin.txt");
  expect_refusal(f, with_data("short.txt"), "tokens of text for sequences of 24");
  expect_refusal(f, with_data("empty.txt"), "empty.txt");
  expect_refusal(f, with_data("text.txt", "--eval-data " + at + "/latin.txt"), "latin.txt");
  expect_refusal(f, with_data("text.txt", "--eval-data " + at + "/none.txt"), "--eval-data");

  nlohmann::json config = nlohmann::json::parse(text_of(f.path() / "model" / "config.json"));
  config["vocab_size"] = 299;
  f.write("narrow.json", config.dump());
  const std::string narrow = fmt::format("--config {0}/narrow.json --tokenizer {0}/tok --data {0}/text.txt", at);
  expect_refusal(f, fmt::format("train {} --seq 24 --out {}/bad", narrow, at),
                 "the tokenizer has 300 tokens, the model's vocab_size is 299");

  fs::create_directory(f.path() / "full");
  f.write("full/note", "x");
  EXPECT_THAT(run_isomer(f.train("full", "--steps 2")).err, HasSubstr("it is not an empty directory"));
  EXPECT_THAT(run_isomer(fmt::format("train --resume {}/full", at)).err, HasSubstr("no run.json in it"));
  EXPECT_THAT(run_isomer(fmt::format("train --resume {}/none", at)).err, HasSubstr("no run.json in it"));
  EXPECT_EQ(std::distance(fs::directory_iterator(f.path() / "full"), fs::directory_iterator()), 1);

  // After all of this the same name is free.
  const auto good = run_isomer(f.train("bad", "--steps 2"));
  EXPECT_EQ(good.exit_code, 0) << good.err;
  EXPECT_THAT(run_isomer(f.train("bad", "--steps 2")).err, HasSubstr("there is a run in it already"));
  for (const std::string option :
       {"--steps 9", "--seq 12", "--dtype bf16", "--config tiny-mla", "--seed 2", "--dry-run"}) {
    const auto refused = run_isomer(fmt::format("train --resume {}/bad {}", at, option));
    EXPECT_EQ(refused.exit_code, 2) << option;
    EXPECT_THAT(refused.err, HasSubstr("with --resume: a run keeps what it began with")) << option;
  }
  const auto done = run_isomer(fmt::format("train --resume {}/bad", at));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(losses_in(f.path() / "bad").size(), 2u);
  fs::remove_all(f.path() / "bad");
}

TEST(TrainProgram, BeginsWithTheWeightsOfAModel) {
  const TrainFolder& f = shared_folder();
  const std::string at = f.at();
  const auto begin = [&](const std::string& out, const std::string& more) {
    return fmt::format(
        "train --init-from {0}/began --data {0}/text.txt --seq 24 --batch 4 --threads 1 --out {0}/{1} {2}", at, out,
        more);
  };
  ASSERT_EQ(run_isomer(f.train("began", "--steps 30")).exit_code, 0);
  const std::vector<double> first = losses_in(f.path() / "began");
  const auto went_on = run_isomer(begin("went-on", "--steps 2 --learning-rate 1e-9 --bias-update-rate 0"));
  ASSERT_EQ(went_on.exit_code, 0) << went_on.err;
  const std::vector<double> second = losses_in(f.path() / "went-on");
  EXPECT_LT(second[0], first[0] - 0.5) << "random weights would give the first run's first loss";
  // The learning rate moves next to nothing: the first run's weights but for rounding.
  const Checkpoint before = Checkpoint::open(f.path() / "began"), after = Checkpoint::open(f.path() / "went-on");
  for (const std::string_view name : before.names()) {
    const Tensor a = before.read(name, DType::f32), b = after.read(name, DType::f32);
    ASSERT_EQ(a.shape(), b.shape()) << name;
    for (std::int64_t i = 0; i < a.numel(); ++i) ASSERT_NEAR(a.data<float>()[i], b.data<float>()[i], 1e-6) << name;
  }
  const nlohmann::json settings = nlohmann::json::parse(text_of(f.path() / "went-on" / "run.json"));
  EXPECT_EQ(settings.at("init_from"), at + "/began");

  expect_refusal(f, begin("bad", "--init-std 1"), "--init-std with --init-from");
  expect_refusal(f, f.train("bad", "--init-from ''"), "--init-from: it is empty");
  expect_refusal(f, f.train("bad", fmt::format("--init-from {}/none", at)), "none: there is no such directory");
  expect_refusal(f, f.train("bad", fmt::format("--init-from {}/tok", at)), "tok");
  nlohmann::json wide = nlohmann::json::parse(text_of(f.path() / "model" / "config.json"));
  wide["hidden_size"] = wide.at("hidden_size").get<int>() + 2;
  f.write("wide.json", wide.dump());
  expect_refusal(f, begin("bad", fmt::format("--config {0}/wide.json --tokenizer {0}/tok", at)), "shape");
  EXPECT_THAT(run_isomer(fmt::format("train --resume {0}/went-on --init-from {0}/began", at)).err,
              HasSubstr("--init-from with --resume"));
  for (const char* run : {"began", "went-on"}) fs::remove_all(f.path() / run);
}

TEST(TrainProgram, ATokenizerFileMayHaveAnyName) {
  const TrainFolder& f = shared_folder();
  fs::create_directory(f.path() / "named");
  fs::copy(f.path() / "tok" / "tokenizer.json", f.path() / "named" / "mine.json");
  const auto result = run_isomer(f.train("named-run", fmt::format("--steps 1 --tokenizer {}/named/mine.json", f.at())));
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

/// Waits until metrics.jsonl has `lines` lines.
bool wait_for_lines(const fs::path& run, std::ptrdiff_t lines, Process& process) {
  for (int i = 0; i < 6000 && !process.has_ended(); ++i) {
    const std::string text = text_of(run / "metrics.jsonl");
    if (std::count(text.begin(), text.end(), '\n') >= lines) return true;
    testing::sleep_ms(10);
  }
  return false;
}

TEST(TrainProgram, CtrlCSavesAndEndsCleanly) {
  const TrainFolder& f = shared_folder();
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string name = fmt::format("signal{}", signal);
    const std::string output = f.at() + "/" + name + ".out";
    Process process(words_of(f.train(name, "--steps 100000 --layout laga:2 --save-every 0")), output);
    ASSERT_TRUE(wait_for_lines(f.path() / name, 3, process)) << text_of(output);
    process.kill(signal);
    EXPECT_EQ(process.wait(), 0) << text_of(output);
    EXPECT_THAT(text_of(output), HasSubstr("with a checkpoint; go on with: isomer train --resume"));
    const auto steps = losses_in(f.path() / name).size();
    EXPECT_GE(steps, 3u);
    EXPECT_EQ(RunDirectory(f.path() / name).latest()->filename(), fmt::format("step-{:08}", steps));
    const auto resumed = run_isomer(fmt::format("train --resume {}/{} --stop-at {}", f.at(), name, steps + 2));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
    EXPECT_EQ(losses_in(f.path() / name).size(), steps + 2);
  }
}

TEST(TrainProgram, OneProcessTrainsInARun) {
  const TrainFolder& f = shared_folder();
  const std::string output = f.at() + "/owner.out";
  Process owner(words_of(f.train("owned", "--steps 100000 --save-every 1")), output);
  ASSERT_TRUE(wait_for_lines(f.path() / "owned", 3, owner)) << text_of(output);
  const auto second = run_isomer(fmt::format("train --resume {}/owned", f.at()));
  EXPECT_NE(second.exit_code, 0);
  EXPECT_THAT(second.err, HasSubstr("another process trains in it"));
  owner.kill(SIGTERM);
  EXPECT_EQ(owner.wait(), 0) << text_of(output);
  const auto step = static_cast<std::int64_t>(losses_in(f.path() / "owned").size());
  const auto behind = run_isomer(fmt::format("train --resume {}/owned --stop-at {}", f.at(), step));
  EXPECT_THAT(behind.err, HasSubstr(fmt::format("the run is at step {} already", step)));
}

TEST(TrainProgram, ADamagedCheckpointIsPassedOverForTheOneBefore) {
  const TrainFolder& f = shared_folder();
  const fs::path run = f.path() / "damaged";
  ASSERT_EQ(run_isomer(f.train("damaged", "--steps 6 --save-every 2")).exit_code, 0);
  const auto expected = losses_in(run);
  const fs::path newest = run / "checkpoints" / "step-00000006";
  fs::resize_file(newest / "optimizer.safetensors", fs::file_size(newest / "optimizer.safetensors") - 100);
  const auto resumed = run_isomer(fmt::format("train --resume {}", run.string()));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("passed over a damaged checkpoint, now " + newest.string() + ".damaged"));
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_TRUE(fs::exists(newest.string() + ".damaged"));
  EXPECT_TRUE(fs::exists(newest / "optimizer.safetensors"));
  EXPECT_EQ(losses_in(run), expected);
}

TEST(TrainProgram, AKilledRunGoesOnAsIfNothingHadHappened) {
  const TrainFolder& f = shared_folder();
  const std::string options = "--steps 60 --save-every 4 --layout laga:2";
  const auto whole = run_isomer(f.train("whole", options));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto expected = losses_in(f.path() / "whole");
  ASSERT_EQ(expected.size(), 60u);
  std::mt19937 random(11);
  const std::string output = f.at() + "/killed.out";
  const fs::path run = f.path() / "killed";
  int kills = 0;
  // Kills before the first checkpoint, between checkpoints, while one is written; then to the end.
  for (const std::ptrdiff_t lines : {2, 7, 8, 20, 41, 1000}) {
    const bool is_there = fs::exists(run);
    Process process(words_of(is_there ? fmt::format("train --resume {}", run.string()) : f.train("killed", options)),
                    output);
    if (lines < 1000 && wait_for_lines(run, lines, process)) {
      testing::sleep_ms(std::uniform_real_distribution<double>(0, 8)(random));
      process.kill(SIGKILL);
      kills += process.wait() == 128 + SIGKILL ? 1 : 0;
    } else {
      ASSERT_EQ(process.wait(), 0) << text_of(output);
    }
  }
  EXPECT_GE(kills, 3);
  EXPECT_EQ(losses_in(run), expected);
  for (const char* name : {"model.safetensors", "latest/optimizer.safetensors"}) {
    EXPECT_TRUE(text_of(run / name) == text_of(f.path() / "whole" / name)) << name;
  }
}

// What the README shows must run: no --warmup, fewer steps than the usual warm-up has.
TEST(TrainProgram, ShortRunsNeedNoScheduleOfTheirOwn) {
  const TrainFolder& f = shared_folder();
  const auto result = run_isomer(f.train("brief", "--steps 3 --learning-rate 1e-4"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(TrainProgram, DryRunsTellOfTheLargest) {
  const auto result = run_isomer("train --config deepseek-v3 --layout laga:8 --seq 16K --batch 1 --dry-run");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("deepseek-v3"));
  EXPECT_FALSE(fs::exists("metrics.jsonl"));
}

}  // namespace
}  // namespace isomer
