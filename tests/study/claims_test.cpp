// The claims' machinery and the figures that must come out, whatever else changes.
#include "study/claims.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "study/claim_runs.h"
#include "study/claim_tables.h"

namespace isomer {
namespace {

TEST(ClaimVerdict, IsComputedFromAgreement) {
  EXPECT_EQ(judge({.fixed_agrees = true}), Verdict::reproduced);
  EXPECT_EQ(judge({.fixed_agrees = true, .other_agrees = true, .explanation_holds = true}), Verdict::reproduced);
  EXPECT_EQ(judge({.other_agrees = true}), Verdict::reproduced_by_another_convention);
  EXPECT_EQ(judge({.other_agrees = true, .explanation_holds = true}), Verdict::reproduced_by_another_convention);
  EXPECT_EQ(judge({.explanation_holds = true}), Verdict::explained_otherwise);
  EXPECT_EQ(judge({}), Verdict::refuted);
}

TEST(ClaimVerdict, AgreesToTheLastPrintedDigit) {
  EXPECT_TRUE(as_printed(587.2025, "587.2"));
  EXPECT_TRUE(as_printed(587.249, "587.2"));
  EXPECT_FALSE(as_printed(587.251, "587.2"));
  EXPECT_TRUE(as_printed(9248.4, "9248"));
  EXPECT_FALSE(as_printed(9247.4, "9248"));
  EXPECT_FALSE(as_printed(NAN, "9248"));
  EXPECT_TRUE(all_as_printed({1.984, 1.879}, {"1.98", "1.88"}));
  EXPECT_FALSE(all_as_printed({1.984}, {"1.98", "1.88"}));
  EXPECT_FALSE(all_as_printed({1.984, 1.88}, {"1.98", "1.87"}));
}

ClaimCase v3(const char* layout, AttentionCore core = AttentionCore::fused, MemoryPolicy policy = MemoryPolicy::lean) {
  return {.config = claims_v3(), .layout = layout, .core = core, .policy = policy};
}

TEST(LagaClaims, ForwardBytesByEveryConvention) {
  const ClaimsOptions options;
  ClaimRuns runs(options);
  const ForwardBytes e = forward_bytes(runs.dry(v3("explicit"))), l = forward_bytes(runs.dry(v3("laga")));
  EXPECT_EQ(fmt::format("{:.1f} {:.1f} {:.2f}", e.sent() / 1e6, l.sent() / 1e6, e.sent() / l.sent()),
            "293.6 163.3 1.80");
  EXPECT_EQ(fmt::format("{:.2f}", e.sent_and_received() / l.sent_and_received()), "1.80");
  EXPECT_EQ(fmt::format("{:.1f} {:.1f} {:.2f}", e.as_published() / 1e6, l.as_published() / 1e6,
                        e.as_published() / l.as_published()),
            "587.2 296.0 1.98");
  EXPECT_EQ(fmt::format("{:.2f}", static_cast<double>(l.local_shard) / 1e6), "2.36");
  // The published figure of explicit's forward is what its forward and backward send: a trap for whoever compares.
  const RankMeasure& rank = runs.dry(v3("explicit")).ranks.front();
  EXPECT_EQ(static_cast<double>(rank.bytes_forward + rank.bytes_backward), e.as_published());
  EXPECT_TRUE(runs.disagreements().empty());
}

TEST(LagaClaims, TheEagerGapIsOneScoreMatrixAndALinearRest) {
  const ClaimsOptions options;
  ClaimRuns runs(options);
  double rest_before = 0;
  for (std::int64_t seq : {4096, 8192, 16384}) {
    ClaimCase absorbed = v3("absorbed-two-product", AttentionCore::eager, MemoryPolicy::framework_eager);
    ClaimCase base = v3("explicit", AttentionCore::eager, MemoryPolicy::framework_eager);
    absorbed.seq = base.seq = seq;
    const double matrix = 128.0 / 8 * static_cast<double>(seq) * static_cast<double>(seq) * 2;
    const double rest = static_cast<double>(runs.dry_peak(absorbed) - runs.dry_peak(base)) - matrix;
    EXPECT_GT(rest, 0);
    EXPECT_LT(rest, 0.05 * matrix);
    if (rest_before > 0) {
      EXPECT_NEAR(rest / rest_before, 2, 1e-6);
    }
    rest_before = rest;
  }
}

// No column of a gradient stands idle through the core's backward: LAGA's lean peak is explicit's and the foreign rows
// of the gathered latent, nothing else.
TEST(LagaClaims, LeanPeakIsExplicitsAndTheGatheredLatent) {
  const ClaimsOptions options;
  ClaimRuns runs(options);
  for (AttentionCore core : {AttentionCore::fused, AttentionCore::eager}) {
    const std::int64_t excess = runs.dry_peak(v3("laga", core)) - runs.dry_peak(v3("explicit", core));
    EXPECT_EQ(excess, 16384 * 7 / 8 * (512 + 64) * 2) << name_of(core);
  }
}

TEST(LagaClaims, DifferencesOfPeaksAddUpToTheGap) {
  const ClaimsOptions options;
  ClaimRuns runs(options);
  const ClaimCase base = v3("explicit"), other = v3("absorbed");
  const EvidenceTable table = standing_differences(runs, base, other, {4096, 16384});
  const Cell& all = table.rows.back().back();
  ASSERT_TRUE(all.number.has_value());
  EXPECT_NEAR(*all.number, static_cast<double>(runs.dry_peak(other) - runs.dry_peak(base)) / 1e6, 1e-6);
}

const Claim& claim_of(const ClaimsReport& report, const std::string& id) {
  const auto found =
      std::find_if(report.claims.begin(), report.claims.end(), [&](const Claim& c) { return c.id == id; });
  if (found == report.claims.end()) throw std::out_of_range(id);
  return *found;
}

TEST(LagaClaims, QuickReportIsWholeAndAgreesWithItself) {
  ClaimsOptions options{.quick = true};
  const ClaimsReport report = laga_claims(options);
  ASSERT_EQ(report.claims.size(), 14u);
  EXPECT_TRUE(report.good()) << (report.disagreements.empty() ? "" : report.disagreements[0]);
  for (const Claim& claim : report.claims) {
    EXPECT_FALSE(claim.claim.empty()) << claim.id;
    EXPECT_FALSE(claim.published.empty()) << claim.id;
    EXPECT_FALSE(claim.found.empty()) << claim.id;
    EXPECT_FALSE(claim.reason.empty()) << claim.id;
    EXPECT_FALSE(claim.command.empty()) << claim.id;
    for (const EvidenceTable& table : claim.evidence) {
      EXPECT_FALSE(table.rows.empty()) << claim.id << ": " << table.title;
      for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size()) << claim.id << ": " << table.title;
    }
  }
  EXPECT_EQ(claim_of(report, "L1").verdict, Verdict::reproduced_by_another_convention);
  EXPECT_EQ(claim_of(report, "L12").verdict, Verdict::reproduced);
  EXPECT_EQ(claim_of(report, "L6").verdict, Verdict::cannot_be_tested_here);
  // What every published gap is held against is computed, so that it can't agree by accident.
  EXPECT_NE(claim_of(report, "L4").verdict, Verdict::cannot_be_tested_here);
  const nlohmann::json json = to_json(report);
  EXPECT_EQ(json.at("claims").size(), 14u);
  EXPECT_TRUE(json.contains("schema_version"));
  EXPECT_EQ(json.at("claims")[0].at("id"), "L1");
  EXPECT_TRUE(json.at("claims")[0].at("evidence")[0].at("rows")[0][1].is_number());
}

TEST(LagaClaims, OnlyNamesWhatThereIs) {
  EXPECT_EQ(laga_claims({.only = {"L12"}}).claims.size(), 1u);
  EXPECT_THROW(laga_claims({.only = {"L15"}}), std::invalid_argument);
}

TEST(BeyondClaims, LatentGatherSendsLessThanLagaAndUpProjectsMore) {
  const ClaimsReport report = beyond_claims({.only = {"B1"}, .quick = true});
  ASSERT_EQ(report.claims.size(), 1u);
  EXPECT_TRUE(report.good()) << (report.disagreements.empty() ? "" : report.disagreements[0]);
  const Claim& claim = report.claims[0];
  EXPECT_EQ(claim.id, "B1");
  EXPECT_EQ(claim.verdict, Verdict::reproduced) << claim.found;
  EXPECT_EQ(claim.command, "isomer claims beyond --only B1");
  const EvidenceTable& table = claim.evidence.at(0);
  ASSERT_EQ(table.rows.size(), 3u);
  const auto number = [&](std::size_t row, std::size_t column) {
    return table.rows[row].at(column).number.value_or(-1);
  };
  EXPECT_GT(number(0, 3), 9 * number(1, 3));  // sent
  EXPECT_GT(number(0, 5), number(1, 5));      // saved
  EXPECT_GT(number(1, 7), 3 * number(0, 7));  // up-projection
  EXPECT_EQ(number(1, 7), number(2, 7));      // latent-ring rebuilds as much
  EXPECT_EQ(to_json(report).at("command"), "claims beyond");
}

TEST(ClaimRuns, KeepsWhatDoesNotAgree) {
  const ClaimsOptions options;
  ClaimRuns runs(options);
  runs.begin("L0");
  runs.disagree("one and another");
  ASSERT_EQ(runs.disagreements().size(), 1u);
  EXPECT_EQ(runs.disagreements()[0], "L0: one and another");
}

}  // namespace
}  // namespace isomer
