// Recordings of long experiments: what is embedded can be read and judged, and what is recorded anew has the same form.
#include "study/recordings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "core/error.h"
#include "model/temp_folder.h"
#include "study/claim_runs.h"
#include "study/link_study.h"
#include "study/training_study.h"

namespace isomer {
namespace {

/// Those that docs/data/ has.
const std::vector<std::string> kKept = {"latent_schemes", "loss_curves", "routing_noise", "throughput"};

TEST(Recordings, EmbeddedOnesAreReadWithoutRunning) {
  for (const std::string& name : kKept) {
    ASSERT_FALSE(embedded_recording(name).empty()) << name;
    const nlohmann::json recorded = recording({}, name, "", []() -> nlohmann::json {
      ADD_FAILURE() << "ran";
      return {};
    });
    EXPECT_FALSE(recorded.at("quick").get<bool>()) << name;
    EXPECT_NE(recorded.at("command").get<std::string>().find("--record"), std::string::npos) << name;
    EXPECT_GT(recorded.at("cores").get<int>(), 0) << name;
  }
  EXPECT_TRUE(embedded_recording("no such thing").empty());
  EXPECT_TRUE(recording({}, "no such thing", "", [] { return nlohmann::json(1); }).is_null());
}

TEST(Recordings, AreWrittenWhereAsked) {
  const TempFolder folder;
  ClaimsOptions options{.quick = true};
  options.record = (folder.path() / "new").string();
  const auto made = recording(options, "thing", "isomer x", [] { return nlohmann::json{{"value", 0.1}}; });
  std::ifstream file(folder.path() / "new" / "thing.json");
  const auto read = nlohmann::json::parse(file);
  EXPECT_EQ(made, read);
  EXPECT_EQ(read.at("value"), 0.1);
  EXPECT_EQ(read.at("command"), "isomer x");
  options.record = "/dev/null/nowhere";
  EXPECT_THROW(recording(options, "thing", "", [] { return nlohmann::json::object(); }), Error);
}

TEST(Recordings, QuickExperimentsGiveWholeClaims) {
  const TempFolder folder;
  ClaimsOptions options{.only = {"L11", "L13", "L14"}, .quick = true};
  options.record = folder.path().string();
  const ClaimsReport report = laga_claims(options);
  ASSERT_EQ(report.claims.size(), 3u);
  EXPECT_TRUE(report.good()) << (report.disagreements.empty() ? "" : report.disagreements[0]);
  for (const Claim& claim : report.claims) {
    EXPECT_NE(claim.verdict, Verdict::cannot_be_tested_here) << claim.id;
    ASSERT_FALSE(claim.evidence.empty()) << claim.id;
    for (const EvidenceTable& table : claim.evidence) {
      EXPECT_FALSE(table.rows.empty()) << claim.id;
      for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size()) << claim.id << ": " << table.title;
    }
  }
  for (const char* name : {"loss_curves", "routing_noise", "throughput"}) {
    EXPECT_TRUE(std::filesystem::exists(folder.path() / (std::string(name) + ".json"))) << name;
  }
}

TEST(Recordings, RecordedClaimsAreJudgedAndOthersSayHowToRecord) {
  const ClaimsReport report = laga_claims({.only = {"L11", "L13", "L14"}});
  ASSERT_EQ(report.claims.size(), 3u);
  EXPECT_TRUE(report.good()) << (report.disagreements.empty() ? "" : report.disagreements[0]);
  const std::map<std::string, std::string> recordings = {
      {"L11", "loss_curves"}, {"L13", "throughput"}, {"L14", "routing_noise"}};
  for (const Claim& claim : report.claims) {
    const bool recorded = !embedded_recording(recordings.at(claim.id)).empty();
    EXPECT_EQ(claim.verdict != Verdict::cannot_be_tested_here, recorded) << claim.id;
    EXPECT_EQ(claim.evidence.empty(), !recorded) << claim.id;
    EXPECT_NE(claim.command.find("--record docs/data"), std::string::npos) << claim.id;
  }
}

TEST(Recordings, LossCurvesEndTogetherAndLagaIsExplicitNotAbsorbed) {
  const Claim claim = laga_claims({.only = {"L11"}}).claims.at(0);
  EXPECT_EQ(claim.verdict, Verdict::refuted) << claim.found;
  const auto recorded = nlohmann::json::parse(embedded_recording("loss_curves"));
  EXPECT_EQ(recorded.at("curves").size(), 19u);
  const double one_rank = recorded.at("curves").at(0).at("end_loss");
  for (const auto& curve : recorded.at("curves")) {
    if (curve.at("name") == "another seed") continue;
    EXPECT_NEAR(curve.at("end_loss").get<double>() / one_rank, 1, 3e-4) << curve.at("name");
  }
}

// The recording that stands in docs/data/ shows what its section in docs/training.md says.
TEST(Recordings, RoutingFlipsLateAndKeepsCurvesApart) {
  const Claim claim = laga_claims({.only = {"L14"}}).claims.at(0);
  EXPECT_EQ(claim.verdict, Verdict::explained_otherwise) << claim.found;
  const EvidenceTable& summary = claim.evidence.at(0);
  ASSERT_EQ(summary.rows.size(), 2u);
  for (const auto& row : summary.rows) {
    EXPECT_EQ(row.at(1).number, 42.0);                               // the first flip
    EXPECT_GT(row.at(3).number.value_or(0), 50);                     // of choices at the end, %
    EXPECT_GT(row.at(7).number.value_or(0), 5 * *row.at(8).number);  // apart at the end, and replayed
    EXPECT_EQ(row.at(9).number, 0.0);                                // replayed routing is the same
  }
}

TEST(TrainingStudy, OneRankOfLagaIsExplicitBitForBitAndAbsorbedIsNot) {
  const TrainingStudy study(true, 1);
  const StudyResult base = study.run({.layout = "explicit"});
  EXPECT_EQ(base.losses.size(), static_cast<std::size_t>(study.settings().steps));
  const Parting laga = parting_of(study.run({.layout = "laga"}), base);
  EXPECT_TRUE(laga.identical);
  EXPECT_EQ(laga.first_step, 0);
  const Parting absorbed = parting_of(study.run({.layout = "absorbed"}), base);
  EXPECT_FALSE(absorbed.identical);
  EXPECT_GT(absorbed.weights_largest, 0);
  EXPECT_LT(absorbed.largest, 1e-3);
}

TEST(TrainingStudy, RoutingIsReplayedByTokenOnOtherRanks) {
  const TrainingStudy study(true, 1);
  RoutingHistory trace = study.run({.layout = "laga"}).routing;
  const std::int64_t rows = study.settings().seq * study.settings().batch,
                     top_k = study.config().moe.num_experts_per_tok;
  ASSERT_EQ(study.routed_layers(), (std::vector<std::int64_t>{1, 2}));
  EXPECT_TRUE(trace.at(0, 0).empty());
  ASSERT_EQ(trace.at(0, 1).size(), static_cast<std::size_t>(rows * top_k));
  // A choice that no router made: every token's second expert becomes the one after its first.
  for (std::int64_t step = 0; step < trace.num_steps(); ++step) {
    for (const std::int64_t layer : study.routed_layers()) {
      auto& experts = trace.at(step, layer);
      for (std::size_t i = 0; i < experts.size(); i += 2) experts[i + 1] = (experts[i] + 1) % 8;
    }
  }
  for (const char* layout : {"laga", "ring"}) {
    const StudyResult replayed = study.run({.layout = layout, .ranks = 2, .replay = &trace});
    for (std::int64_t step = 0; step < trace.num_steps(); ++step) {
      for (const std::int64_t layer : study.routed_layers()) {
        EXPECT_EQ(replayed.routing.at(step, layer), trace.at(step, layer)) << layout << ", step " << step;
      }
    }
  }
}

TEST(TrainingStudy, OneUlpChangesARun) {
  const TrainingStudy study(true, 1);
  const StudyResult base = study.run({.layout = "laga"}),
                    moved = study.run({.layout = "laga", .moves_one_weight = true});
  const Parting parting = parting_of(moved, base);
  EXPECT_FALSE(parting.identical);
  EXPECT_GE(parting.first_step, 1);
}

TEST(RoutingHistory, CountsTokensWhoseSetsDiffer) {
  RoutingHistory a(1, 1), b(1, 1);
  a.at(0, 0) = {0, 1, 2, 3, 4, 5};
  b.at(0, 0) = {1, 0, 2, 4, 4, 5};  // the same set in another order, another set, the same
  EXPECT_EQ(count_flips(a, b, 0, 0, 2), 1);
  EXPECT_EQ(count_flips(a, a, 0, 0, 2), 0);
}

TEST(LinkStudy, CrossoverIsBytesOverSeconds) {
  EXPECT_DOUBLE_EQ(crossover_bandwidth(2e6, 0.5), 4e6);
  EXPECT_EQ(crossover_bandwidth(-1, 0.5), 0);
  EXPECT_EQ(crossover_bandwidth(1, -0.5), 0);
}

TEST(LinkStudy, SlowLinksCostWhatTheirBytesTake) {
  ModelConfig config = claims_v2_lite();
  config.hidden_size = 64;
  const BlockData data = link_data(config, 64, 1);
  const LinkCase c{.layout = "explicit", .ranks = 4, .seq = 64, .bandwidth = 5e6};
  const LinkTime slow = time_block(config, c, data, 1);
  EXPECT_GE(slow.seconds, slow.bytes / 5e6);
  const std::vector<LinkTime> read = link_times_from(nlohmann::json::array({to_json(slow)}));
  EXPECT_EQ(find_time(read, c).seconds, slow.seconds);
  EXPECT_EQ(find_time(read, c).bytes, slow.bytes);
  EXPECT_THROW(find_time(read, {.layout = "laga", .ranks = 4, .seq = 64, .bandwidth = 5e6}), Error);
}

}  // namespace
}  // namespace isomer
