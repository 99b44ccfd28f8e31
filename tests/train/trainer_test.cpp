// Whole runs: every scheme agrees with one rank step by step, a resumed run has the bits of an unbroken one, a dry run
// the accounts of a real one, and trouble leaves the last checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "full_tests.h"
#include "model/temp_folder.h"
#include "study/program.h"
#include "train/train_fixture.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::kGroupedModel;
using testing::kLatentModel;
using testing::RoutingTape;
using testing::small_run;
using testing::text_of;

struct History {
  std::vector<double> losses, norms;
  TrainResult result;
};

History train_and_watch(TrainRun& run, const RunDirectory& directory = RunDirectory("")) {
  History history;
  run.on_step = [&](const StepMetrics& m) {
    history.losses.push_back(m.loss);
    history.norms.push_back(m.gradient_norm);
  };
  history.result = train(run, directory);
  return history;
}

constexpr std::int64_t kSteps = 8;

/// One rank's run and what its routers chose.
struct Alone {
  History history;
  RoutingTape tape{23, 4};
};

const Alone& alone(const std::string& model) {
  static std::map<std::string, Alone> runs;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto found = runs.find(model);
  if (found != runs.end()) return found->second;
  Alone& made = runs[model];
  TrainRun run = small_run(model, model == kLatentModel ? "laga:1" : "explicit:1", kSteps);
  run.routing_sink = [&](std::int64_t step, std::int64_t layer, int, const Routing& routing) {
    made.tape.record(step, layer, routing);
  };
  made.history = train_and_watch(run);
  return made;
}

class TrainsAlike : public ::testing::TestWithParam<std::pair<std::string, std::string>> {};

TEST_P(TrainsAlike, EveryStepHasTheLossOfOneRank) {
  const auto& [layout, model] = GetParam();
  const Alone& one = alone(model);
  ASSERT_EQ(one.history.losses.size(), static_cast<std::size_t>(kSteps));
  EXPECT_LT(one.history.losses.back(), 0.97 * one.history.losses.front()) << "nothing is learnt";
  RoutingTape tape = one.tape;
  TrainRun run = small_run(model, layout, kSteps);
  tape.deal(parse_layout(run.settings.layout));
  run.routing = [&](std::int64_t step, std::int64_t layer, int rank) { return tape.source(step, layer, rank); };
  const History history = train_and_watch(run);
  ASSERT_EQ(history.losses.size(), one.history.losses.size());
  for (std::size_t step = 0; step < history.losses.size(); ++step) {
    // The first loss differs by rounding alone; then Adam turns rounding of a tiny gradient into a whole step of a
    // weight that hardly matters.
    const double bound = step == 0 ? 2e-6 : 2e-4;
    EXPECT_NEAR(history.losses[step], one.history.losses[step], bound * one.history.losses[step]) << "step " << step;
    EXPECT_NEAR(history.norms[step], one.history.norms[step], 50 * bound * one.history.norms[step]) << "step " << step;
  }
}

std::vector<std::pair<std::string, std::string>> alike_cases() {
  std::vector<std::pair<std::string, std::string>> cases;
  for (const int ranks : {2, 4}) {
    for (const std::string scheme :
         {"explicit", "explicit-shared-rope", "absorbed", "laga", "ring", "latent-gather", "latent-ring"}) {
      cases.emplace_back(fmt::format("{}:{}", scheme, ranks), kLatentModel);
    }
    for (const std::string scheme : {"explicit", "ring"}) {
      cases.emplace_back(fmt::format("{}:{}", scheme, ranks), kGroupedModel);
    }
  }
  for (const std::string layout : {"laga:2,ring:2", "explicit:2,ring:2", "laga:2,latent-ring:2", "laga:2,dp:2",
                                   "ring:1,dp:4", "laga:2,recompute=block"}) {
    cases.emplace_back(layout, kLatentModel);
  }
  cases.emplace_back("explicit:2,dp:2", kGroupedModel);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, TrainsAlike, ::testing::ValuesIn(alike_cases()), [](const auto& test) {
  return testing::plain_name(test.param.first) + (test.param.second == kLatentModel ? "_latent" : "_grouped");
});

// The mean over the global batch: a rank with few targets must not weigh as much as one with many.
TEST(Trainer, LossIsTheMeanOverAllTargetsHoweverTheyLie) {
  // Two sequences of documents of two tokens, then one document alone: half as many targets.
  std::vector<std::vector<std::int32_t>> texts(23, {3, 10});
  texts.emplace_back(60, 5);
  const auto data = std::make_shared<const BatchOrder>(TokenDataset::from_tokens(texts, testing::kVocab),
                                                       BatchOptions{.seq_len = 23, .shuffle = false});
  std::vector<double> losses, norms;
  for (const std::string layout : {"explicit:1", "explicit:1,dp:4", "ring:2,dp:2", "explicit:4"}) {
    TrainRun run = small_run(kGroupedModel, layout, 1);
    run.data = data;
    const History history = train_and_watch(run);
    losses.push_back(history.losses[0]);
    norms.push_back(history.norms[0]);
  }
  const auto targets = [&](std::int64_t sample) {
    const Sample s = data->sample(sample);
    return std::count_if(s.targets.begin(), s.targets.end(), [](int t) { return t >= 0; });
  };
  ASSERT_LT(targets(0) + 8, targets(3)) << "the replicas should differ";
  for (std::size_t i = 1; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], losses[0], 2e-6 * losses[0]);
    EXPECT_NEAR(norms[i], norms[0], 1e-4 * norms[0]);
  }
}

/// A run that writes to `folder`.
TrainRun written_run(const std::string& model, const std::string& layout, const std::string& dtype) {
  TrainRun run = small_run(model, layout, 7);
  run.settings.dtype = dtype;
  run.save_weights = true;
  return run;
}

void expect_same_files(const fs::path& a, const fs::path& b) {
  for (const char* name : {"model.safetensors", "latest/optimizer.safetensors"}) {
    EXPECT_GT(fs::file_size(a / name), 1000u);
    EXPECT_TRUE(text_of(a / name) == text_of(b / name)) << name;
  }
}

std::vector<std::int64_t> steps_in_metrics(const fs::path& directory) {
  std::ifstream file(directory / "metrics.jsonl");
  std::vector<std::int64_t> steps;
  for (std::string line; std::getline(file, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
  return steps;
}

struct ResumeCase {
  std::string model, layout, dtype;
};

class Resumes : public ::testing::TestWithParam<ResumeCase> {};

TEST_P(Resumes, WithTheBitsOfAnUnbrokenRun) {
  const ResumeCase& c = GetParam();
  const TempFolder folder;
  const RunDirectory whole(folder.path() / "whole");
  TrainRun unbroken = written_run(c.model, c.layout, c.dtype);
  whole.create(to_json(unbroken.settings));
  const History expected = train_and_watch(unbroken, whole);
  const std::vector<std::int64_t> all{1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(steps_in_metrics(whole.path()), all);

  for (const std::vector<std::int64_t>& stops : {std::vector<std::int64_t>{1}, {4}, {2, 3, 6}}) {
    const RunDirectory parts(folder.path() / fmt::format("parts{}-{}", stops.size(), stops[0]));
    parts.create(to_json(unbroken.settings));
    std::vector<double> losses;
    for (std::size_t part = 0; part <= stops.size(); ++part) {
      TrainRun run = written_run(c.model, c.layout, c.dtype);
      run.settings = train_settings_from(parts.settings(), "run.json");
      run.resume = part > 0;
      run.stop_at = part < stops.size() ? stops[part] : 0;
      const History history = train_and_watch(run, parts);
      EXPECT_EQ(history.result.steps, part < stops.size() ? stops[part] : 7);
      losses.insert(losses.end(), history.losses.begin(), history.losses.end());
    }
    EXPECT_EQ(losses, expected.losses);
    EXPECT_EQ(steps_in_metrics(parts.path()), all);
    expect_same_files(whole.path(), parts.path());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Resumes,
                         ::testing::Values(ResumeCase{kLatentModel, "laga:1", "f32"},
                                           ResumeCase{kLatentModel, "laga:2", "bf16"},
                                           ResumeCase{kGroupedModel, "ring:2", "f32"},
                                           ResumeCase{kLatentModel, "laga:2,dp:2", "f32"}),
                         [](const auto& test) {
                           return testing::plain_name(test.param.layout + test.param.dtype +
                                                      (test.param.model == kLatentModel ? "latent" : "grouped"));
                         });

TEST(Trainer, ResumesUnderAnotherLayoutAndSaysSo) {
  for (const auto& [model, first, second] : {std::tuple{kGroupedModel, "explicit:1", "ring:2"},
                                             {kLatentModel, "laga:1", "laga:2,dp:2"},
                                             {kLatentModel, "latent-ring:2", "explicit:4"}}) {
    const TempFolder folder;
    const RunDirectory directory(folder.path() / "run");
    TrainRun run = written_run(model, first, "f32");
    run.settings.steps = kSteps;
    run.stop_at = 4;
    directory.create(to_json(run.settings));
    RoutingTape tape = alone(model).tape;
    tape.deal(parse_layout(run.settings.layout));
    run.routing = [&](std::int64_t step, std::int64_t layer, int rank) { return tape.source(step, layer, rank); };
    train_and_watch(run, directory);

    TrainRun other = written_run(model, second, "f32");
    other.settings.steps = kSteps;
    other.resume = true;
    tape.deal(parse_layout(other.settings.layout));
    other.routing = [&](std::int64_t step, std::int64_t layer, int rank) { return tape.source(step, layer, rank); };
    std::string said;
    other.on_message = [&](const std::string& text) { said += text + "\n"; };
    const History history = train_and_watch(other, directory);
    EXPECT_THAT(said, HasSubstr(fmt::format("resumed at step 4: written under {}", first)));
    EXPECT_THAT(said, HasSubstr(fmt::format("going on under {}", second)));
    const auto& expected = alone(model).history.losses;
    ASSERT_EQ(history.losses.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(history.losses[i], expected[4 + i], 2e-4 * expected[4 + i]);
  }
}

/// Overwrites a float32 of a safetensors file.
void poison(const fs::path& file, const std::string& tensor) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t size = 0;
  stream.read(reinterpret_cast<char*>(&size), sizeof size);
  std::string header(size, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(size));
  const std::uint64_t begin = nlohmann::json::parse(header).at(tensor).at("data_offsets").at(0);
  const float nan = NAN;
  stream.seekp(static_cast<std::streamoff>(8 + size + begin));
  stream.write(reinterpret_cast<const char*>(&nan), sizeof nan);
}

TEST(Trainer, ANanEndsTheRunAndLeavesTheLastCheckpoint) {
  for (const std::string layout : {"laga:1", "laga:2"}) {
    const TempFolder folder;
    const RunDirectory directory(folder.path() / "run");
    TrainRun run = written_run(kLatentModel, layout, "f32");
    directory.create(to_json(run.settings));
    run.stop_at = 3;
    train_and_watch(run, directory);
    const fs::path checkpoint = *directory.latest();
    poison(checkpoint / "optimizer.safetensors", "master.model.norm.weight");
    const std::string model = text_of(checkpoint / "model.safetensors");
    TrainRun again = written_run(kLatentModel, layout, "f32");
    again.resume = true;
    try {
      train_and_watch(again, directory);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("step 4: loss nan"));
      EXPECT_THAT(error.what(), HasSubstr("the last checkpoint stands"));
    }
    EXPECT_EQ(directory.latest(), checkpoint);
    EXPECT_TRUE(text_of(folder.path() / "run" / "model.safetensors") == model);
    EXPECT_EQ(steps_in_metrics(directory.path()), (std::vector<std::int64_t>{1, 2, 3}));
  }
}

class DryRuns : public ::testing::TestWithParam<std::pair<std::string, std::string>> {};

TEST_P(DryRuns, CountWhatARealStepOfTheSameRoutingDoes) {
  const auto& [layout, dtype] = GetParam();
  const bool latent = layout.find("gqa ") != 0;
  TrainRun run = small_run(latent ? kLatentModel : kGroupedModel, latent ? layout : layout.substr(4), 2);
  run.settings.dtype = dtype;
  // Every token is a target, as in a dry run.
  run.data = std::make_shared<const BatchOrder>(
      TokenDataset::from_tokens({std::vector<std::int32_t>(400, 3)}, testing::kVocab),
      BatchOptions{.seq_len = run.settings.seq});
  run.routing = [](std::int64_t, std::int64_t, int) { return RoutingSource{.kind = RoutingSource::Kind::balanced}; };
  run.eval_data = run.data;
  const auto real = train(run, RunDirectory("")).accounts;
  run.group.dry_run = true;
  const auto dry = train(run, RunDirectory("")).accounts;
  ASSERT_EQ(real.size(), dry.size());
  for (std::size_t rank = 0; rank < real.size(); ++rank) {
    const TrainAccount &a = real[rank], &b = dry[rank];
    EXPECT_EQ(a.weight_bytes, b.weight_bytes);
    EXPECT_EQ(a.gradient_bytes, b.gradient_bytes);
    EXPECT_EQ(a.optimiser_bytes, b.optimiser_bytes);
    EXPECT_EQ(a.peak_activation_bytes, b.peak_activation_bytes);
    EXPECT_EQ(a.bytes_forward, b.bytes_forward);
    EXPECT_EQ(a.bytes_backward, b.bytes_backward);
    EXPECT_EQ(a.bytes_gradient_sync, b.bytes_gradient_sync);
    EXPECT_EQ(a.flops, b.flops);
    EXPECT_GT(b.peak_activation_bytes, 0);
    EXPECT_GT(b.flops, 0);
    const bool sends = real.size() > 1 && layout.find("dp") == std::string::npos;
    EXPECT_EQ(b.bytes_forward > 0, sends || layout.starts_with("laga:2"));
    EXPECT_EQ(b.bytes_gradient_sync > 0, real.size() > 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, DryRuns,
                         ::testing::Values(std::pair{"laga:1", "f32"}, std::pair{"laga:2", "bf16"},
                                           std::pair{"explicit:4", "f32"}, std::pair{"latent-ring:4", "f32"},
                                           std::pair{"laga:2,ring:2", "bf16"}, std::pair{"laga:2,dp:2", "f32"},
                                           std::pair{"laga:2,recompute=block", "f32"},
                                           std::pair{"latent-gather:3", "f32"}, std::pair{"gqa explicit:4", "f32"},
                                           std::pair{"gqa ring:1,dp:2", "bf16"}),
                         [](const auto& test) {
                           return testing::plain_name(test.param.first + std::string("_") + test.param.second);
                         });

TEST(Trainer, RecomputationLowersThePeakOfADryRun) {
  const auto peak = [](const std::string& layout) {
    TrainRun run = small_run(kLatentModel, layout, 1);
    run.settings.seq = 64;
    run.group.dry_run = true;
    return train(run, RunDirectory("")).accounts[0].peak_activation_bytes;
  };
  EXPECT_LT(peak("laga:2,recompute=attention"), peak("laga:2"));
  EXPECT_LT(peak("laga:2,recompute=block"), peak("laga:2,recompute=attention"));
}

TEST(Trainer, EvaluationCountsEveryTargetOnceUnderEveryLayout) {
  std::vector<double> losses;
  for (const std::string layout : {"laga:1", "laga:2", "laga:1,dp:4", "latent-ring:2,dp:2"}) {
    for (const std::int64_t micro : {0, 1}) {
      TrainRun run = small_run(kLatentModel, layout, 1);
      run.settings.micro_batch = micro;
      run.settings.adamw.learning_rate = run.settings.adamw.min_learning_rate = 0;
      run.settings.bias_update_rate = 0;
      run.eval_data = std::make_shared<const BatchOrder>(
          testing::documents(20), BatchOptions{.seq_len = 23, .shuffle = false, .keep_tail = true});
      run.settings.eval_sequences = 7;  // divides into nothing
      double loss = 0;
      run.on_step = [&](const StepMetrics& m) { loss = m.eval_loss.value_or(-1); };
      train(run, RunDirectory(""));
      losses.push_back(loss);
    }
  }
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 1e-4 * losses[0]);
  EXPECT_GT(losses[0], 1);
}

TEST(Trainer, RefusesRunsThatDoNotFitBeforeTheyStart) {
  const auto refusal = [](TrainRun run) -> std::string {
    try {
      train(run, RunDirectory(""));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no refusal";
  };
  TrainRun run = small_run(kLatentModel, "laga:2,dp:2", 4);
  run.settings.batch = 5;
  EXPECT_THAT(refusal(run), HasSubstr("--batch 5: 2 data-parallel replicas don't divide it; take 4 or 6"));
  run.settings.batch = 6;
  run.settings.micro_batch = 2;
  EXPECT_THAT(refusal(run), HasSubstr("--micro-batch 2: it doesn't divide the 3 sequences"));
  run = small_run(kLatentModel, "laga:5", 4);
  EXPECT_THAT(refusal(run), HasSubstr("5 ranks don't divide 24 heads"));
  run = small_run(kLatentModel, "ring:2", 4);
  run.settings.attention = "eager";
  EXPECT_THAT(refusal(run), HasSubstr("attention=fused"));
  run = small_run(kLatentModel, "laga:1", 4);
  run.settings.seq = 65;
  EXPECT_THAT(refusal(run), HasSubstr("--seq 65: 'small' is made for positions up to 64"));
  run = small_run(kGroupedModel, "explicit:1", 4);
  run.settings.layout = "laga:1";
  EXPECT_THAT(refusal(run), HasSubstr("'laga' is unknown for grouped-query attention"));
}

}  // namespace
}  // namespace isomer
