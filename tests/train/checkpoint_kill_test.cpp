// kill -9 at random moments: never a broken checkpoint, never one lost that was reported as saved, and a run that goes
// on as if nothing had happened.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/checkpoint.h"
#include "model/temp_folder.h"
#include "study/program.h"
#include "train/killed_process.h"
#include "train/train_fixture.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using testing::config_from;
using testing::kLatentModel;
using testing::text_of;

const RunDirectory::ModelFiles kFiles{.config_json = kLatentModel, .tokenizer_json = "{}", .tokenizer_config_json = {}};

/// What step `step` leaves in entry i: exact in float32, and rounded weights still tell steps apart.
float value_of(std::int64_t step, std::int64_t i, int kind) {
  return static_cast<float>(step * 4 + kind) + static_cast<float>(i % 4) * 0.25F;
}

template <class Fn>
void for_each_entry(const Parameters& parameters, Fn&& fn) {
  int kind = 0;
  for (const Tensor* flat : {&parameters.master, &parameters.first_moment, &parameters.second_moment}) {
    for (const Parameter& p : parameters.list()) {
      float* data = parameters.view(*flat, p).data<float>();
      for (std::int64_t i = 0; i < p.count; ++i) fn(data[i], i, kind);
    }
    ++kind;
  }
  parameters.master_weights.for_each([&](const std::string& name, const Tensor& tensor) {
    if (!name.ends_with("e_score_correction_bias")) return;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) fn(tensor.data<float>()[i], i, 3);
  });
}

/// The child: goes on where the run stands and saves step after step, each reported when it is.
[[noreturn]] void save_until_killed(const fs::path& path, int report) {
  try {
    const ModelConfig config = config_from(kLatentModel);
    const RunDirectory directory(path);
    RankContext ctx({});
    Parameters parameters(ctx, config, DType::f32);
    TrainerState state;
    if (directory.latest()) state = directory.load(ctx, parameters).state;
    directory.repair(2);
    for (;;) {
      ++state.step;
      state.samples = state.step * 3;
      for_each_entry(parameters,
                     [&](float& entry, std::int64_t i, int kind) { entry = value_of(state.step, i, kind); });
      directory.save(parameters, state, kFiles, DType::f32, 2);
      if (::write(report, &state.step, sizeof state.step) != sizeof state.step) _exit(3);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "child: {}\n", error.what());
    _exit(4);
  }
}

/// Starts a child, kills it after `ms` (counted from its first report), and returns the last step it reported.
std::int64_t kill_a_child(const fs::path& path, double ms) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    ::close(ends[0]);
    save_until_killed(path, ends[1]);
  }
  ::close(ends[1]);
  std::int64_t step = 0, last = -1;
  if (::read(ends[0], &step, sizeof step) == sizeof step) last = step;
  testing::sleep_ms(ms);
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself, code " << WEXITSTATUS(status);
  while (::read(ends[0], &step, sizeof step) == sizeof step) last = step;
  ::close(ends[0]);
  return last;
}

void expect_whole(const fs::path& path, std::int64_t reported) {
  const ModelConfig config = config_from(kLatentModel);
  RankContext ctx({});
  Parameters parameters(ctx, config, DType::f32);
  const TrainerState state = RunDirectory(path).load(ctx, parameters).state;
  EXPECT_GE(state.step, reported);
  EXPECT_LE(state.step, reported + 1);  // the one that was being saved
  EXPECT_EQ(state.samples, state.step * 3);
  std::int64_t wrong = 0;
  for_each_entry(parameters, [&](float& entry, std::int64_t i, int kind) {
    wrong += entry == value_of(state.step, i, kind) ? 0 : 1;
  });
  EXPECT_EQ(wrong, 0) << "step " << state.step;

  // The run's root is a model, of a step that was reported or came after.
  EXPECT_EQ(load_model_config(path.string()).hidden_size, config.hidden_size);
  const ModelWeights model = load_model_weights(Checkpoint::open(path), config, DType::f32);
  const auto step = static_cast<std::int64_t>(std::floor(model.embed_tokens.data<float>()[0] / 4));
  EXPECT_GE(step, reported);
  EXPECT_LE(step, state.step);
  model.for_each([&](const std::string& name, const Tensor& tensor) {
    const int kind = name.ends_with("e_score_correction_bias") ? 3 : 0;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      ASSERT_EQ(tensor.data<float>()[i], value_of(step, i, kind)) << name;
    }
  });
}

TEST(CheckpointKill, LeavesTheLastSavedStepWhole) {
  const TempFolder folder;
  const fs::path path = folder.path() / "run";
  RunDirectory(path).create({{"schema_version", 1}});
  std::mt19937 random(7);
  std::uniform_real_distribution<double> delay_ms(0, 60);
  std::int64_t largest = 0;
  for (int kill = 0; kill < 60; ++kill) {
    SCOPED_TRACE(fmt::format("kill {}", kill));
    const std::int64_t reported = kill_a_child(path, delay_ms(random));
    ASSERT_GE(reported, largest) << "a saved step was lost";
    largest = reported;
    expect_whole(path, reported);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(largest, 60);
  // What kills left behind goes with the next save.
  RunDirectory(path).repair(2);
  std::size_t entries = 0;
  for (const auto& entry : fs::directory_iterator(path / "checkpoints")) {
    EXPECT_EQ(entry.path().extension(), "") << entry.path();
    ++entries;
  }
  EXPECT_EQ(entries, 2u);
}

// Killed before its first links, or between a checkpoint's rename and its link.
TEST(CheckpointKill, RepairPointsTheRootAtTheNewestCheckpoint) {
  const TempFolder folder;
  const RunDirectory directory(folder.path() / "run");
  directory.create({{"schema_version", 1}});
  RankContext ctx({});
  Parameters parameters(ctx, config_from(kLatentModel), DType::f32);
  for (const std::int64_t step : {1, 2}) directory.save(parameters, {.step = step}, kFiles, DType::f32, 2);
  const fs::path root = directory.path();
  fs::remove(root / "latest");
  fs::create_symlink("checkpoints/step-00000001", root / "latest");
  fs::remove(root / "model.safetensors");
  fs::create_directory(root / "checkpoints" / "step-00000003.unfinished");
  directory.repair(2);
  EXPECT_EQ(fs::read_symlink(root / "latest"), "checkpoints/step-00000002");
  EXPECT_TRUE(fs::exists(root / "model.safetensors"));
  EXPECT_TRUE(fs::exists(root / "tokenizer.json"));
  EXPECT_FALSE(fs::exists(root / "checkpoints" / "step-00000003.unfinished"));
}

TEST(RunDirectory, RefusesForeignAndBrokenCheckpoints) {
  const TempFolder folder;
  const RunDirectory directory(folder.path() / "run");
  directory.create({{"schema_version", 1}});
  RankContext ctx({});
  Parameters parameters(ctx, config_from(kLatentModel), DType::f32);
  EXPECT_THROW(directory.load(ctx, parameters), Error);  // none yet
  directory.save(parameters, {.step = 5}, kFiles, DType::f32, 2);
  EXPECT_EQ(directory.load(ctx, parameters).state.step, 5);
  Parameters other(ctx, config_from(testing::kGroupedModel), DType::f32);
  EXPECT_THROW(directory.load(ctx, other), Error);
  const fs::path checkpoint = *directory.latest();
  const std::string state = text_of(checkpoint / "trainer.json");
  for (const std::string& text :
       {std::string(), std::string("{}"), state.substr(0, state.size() / 2),
        std::string(R"({"layout":"","ranks":1,"samples":0,"seconds":0,"step":6,"tokens":0})"),
        std::string(R"({"layout":"","ranks":1,"samples":-1,"seconds":0,"step":5,"tokens":0})")}) {
    std::ofstream(checkpoint / "trainer.json") << text;
    EXPECT_THROW(directory.load(ctx, parameters), Error) << text;
  }
  std::ofstream(checkpoint / "trainer.json") << state;
  EXPECT_EQ(directory.load(ctx, parameters).state.step, 5);
  fs::resize_file(checkpoint / "optimizer.safetensors", fs::file_size(checkpoint / "optimizer.safetensors") - 4);
  EXPECT_THROW(directory.load(ctx, parameters), Error);
}

TEST(RunDirectory, IsMadeWholeOrNotAtAll) {
  const TempFolder folder;
  const fs::path path = folder.path() / "deep" / "run";
  const RunDirectory directory(path);
  EXPECT_THROW(directory.create({{"a", 1}}, [](const fs::path&) { throw Error("no room"); }), Error);
  EXPECT_FALSE(fs::exists(path));
  // As a kill leaves it.
  fs::create_directories(folder.path() / "deep" / ".run.unfinished" / "checkpoints");
  fs::create_directory(path);  // an empty directory may be there
  directory.create({{"a", 1}}, [](const fs::path& place) { std::ofstream(place / "tokens.bin") << "x"; });
  EXPECT_EQ(directory.settings().at("a"), 1);
  EXPECT_EQ(text_of(path / "tokens.bin"), "x");
  EXPECT_THROW(directory.create({{"a", 2}}), std::invalid_argument);
  EXPECT_EQ(std::distance(fs::directory_iterator(path.parent_path()), fs::directory_iterator()), 1);
  folder.write("file", "x");
  EXPECT_THROW(RunDirectory(folder.path() / "file").create({{"a", 1}}), std::invalid_argument);
  EXPECT_THROW(RunDirectory(folder.path()).create({{"a", 1}}), std::invalid_argument);
  RunDirectory(folder.path() / "slash/").create({{"a", 3}});
  EXPECT_EQ(RunDirectory(folder.path() / "slash").settings().at("a"), 3);
}

TEST(RunDirectory, MetricsKeepWhatTheCheckpointCovers) {
  const TempFolder folder;
  const RunDirectory directory(folder.path());
  const std::string kept = "{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":1}\n";
  folder.write("metrics.jsonl", kept + "{\"step\":3,\"loss\":1}\nnot json\n{\"step\":\"1\"}\n{\"st");
  directory.truncate_metrics(2);
  EXPECT_EQ(text_of(directory.metrics_file()), kept);
  directory.truncate_metrics(0);
  EXPECT_EQ(text_of(directory.metrics_file()), "");
}

}  // namespace
}  // namespace isomer
