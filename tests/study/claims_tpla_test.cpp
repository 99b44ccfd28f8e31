// TPLA's claims: every one has figures and a verdict, and what is timed can be recorded anew.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "model/temp_folder.h"
#include "study/claims_tpla_priced.h"
#include "study/claims_tpla_quality.h"
#include "study/claims_tpla_times.h"
#include "study/recordings.h"

namespace isomer {
namespace {

TEST(TplaClaims, EveryClaimHasFiguresAndAVerdict) {
  const ClaimsReport report = tpla_claims({});
  ASSERT_EQ(report.claims.size(), 12u);
  for (const Claim& claim : report.claims) {
    EXPECT_FALSE(claim.claim.empty() || claim.published.empty() || claim.found.empty()) << claim.id;
    if (claim.id == "T12" && embedded_recording("smollm2_tpla").empty()) continue;
    EXPECT_NE(claim.verdict, Verdict::cannot_be_tested_here) << claim.id;
    EXPECT_NE(claim.found, "-") << claim.id;
    ASSERT_FALSE(claim.evidence.empty()) << claim.id;
    for (const EvidenceTable& table : claim.evidence) {
      for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size()) << claim.id;
    }
  }
}

TEST(TplaClaims, TimesAreRecordedAndJudgedAnew) {
  const TempFolder folder;
  ClaimsOptions options{.only = {"T5", "T6"}, .quick = true};
  options.record = folder.path().string();
  const ClaimsReport report = tpla_claims(options);
  ASSERT_EQ(report.claims.size(), 2u);
  for (const Claim& claim : report.claims) {
    ASSERT_EQ(claim.evidence.size(), 2u) << claim.id;  // measured, priced
    ASSERT_EQ(claim.evidence[0].rows.size(), 3u);      // 16, 64 and 128 heads
    EXPECT_NE(claim.evidence[0].title.find("measured"), std::string::npos);
    for (const auto& row : claim.evidence[0].rows) {
      ASSERT_EQ(row.size(), claim.evidence[0].header.size());
      for (std::size_t i = 4; i < row.size(); ++i) EXPECT_GT(row[i].number.value(), 0) << claim.id << " " << i;
    }
  }
  // What is counted does not depend on the machine: a shard's absorbed prefill computes more than an exact one of half
  // of the heads.
  for (const auto& row : report.claims[1].evidence[0].rows) EXPECT_GT(row.back().number.value(), 1);
}

TEST(TplaClaims, LayoutsAreTimedBesideEachOther) {
  const TempFolder folder;
  ClaimsOptions options{.only = {"B2"}, .quick = true};
  options.record = folder.path().string();
  const Claim claim = beyond_claims(options).claims.at(0);
  ASSERT_EQ(claim.evidence.size(), 2u);
  const EvidenceTable& times = claim.evidence[1];
  ASSERT_EQ(times.rows.size(), 5u);
  EXPECT_EQ(times.header, (std::vector<std::string>{"layout", "64", "128"}));
  for (const auto& row : times.rows) {
    for (const std::size_t i : {1, 2}) EXPECT_GT(row.at(i).number.value(), 0) << row[0].text;
  }
  // The row of a layout has its times, whatever the conversion.
  for (const auto& row : claim.evidence[0].rows) {
    const auto same = std::find_if(times.rows.begin(), times.rows.end(),
                                   [&](const auto& other) { return other[0].text == row[0].text; });
    ASSERT_NE(same, times.rows.end()) << row[0].text;
    EXPECT_EQ(row.at(7).number, same->at(1).number);
  }
  EXPECT_THROW(find_time({}, {.model = "deepseek-v3", .layout = "tp:2"}), Error);
}

TEST(TplaClaims, TheRewriteIsTheSameFunctionWithoutRounding) {
  const Claim claim = tpla_same_function({});
  EXPECT_EQ(claim.verdict, Verdict::reproduced);
  EXPECT_GT(claim.evidence.at(0).rows.at(0).at(2).number.value(), 0);  // two forwards that differ in their sums
}

TEST(TplaClaims, ShardedCacheHoldsLargerBatches) {
  const Claim decode = tpla_decode_priced({});
  for (const auto& row : decode.evidence.at(0).rows) {
    const double mla = row.at(2).number.value(), tpla = row.at(4).number.value(), ratio = row.at(7).number.value();
    EXPECT_GT(tpla, mla);
    EXPECT_GT(ratio, 0.9);  // 320 of 576 cached elements, and never more than twice the throughput
    EXPECT_LT(ratio, 2.5);
  }
}

TEST(TplaClaims, CountsOfTheEngine) {
  const ClaimsReport report = tpla_claims({.only = {"T2", "T7"}});
  EXPECT_EQ(report.claims.at(0).verdict, Verdict::reproduced);
  EXPECT_EQ(report.claims.at(1).verdict, Verdict::reproduced);
  const EvidenceTable& cache = report.claims.at(0).evidence.at(0);
  std::vector<double> elements;
  for (const auto& row : cache.rows) elements.push_back(row.at(1).number.value());
  EXPECT_EQ(elements, (std::vector<double>{576, 320, 320, 320, 288}));  // tp, gla, tpla, exact-latent, kvp
}

TEST(TplaClaims, LayoutsAndSharedColumnsBesideEachOther) {
  const ClaimsReport report = beyond_claims({.only = {"B2", "B5"}});
  ASSERT_EQ(report.claims.size(), 2u);
  const EvidenceTable& layouts = report.claims[0].evidence.at(0);
  ASSERT_EQ(layouts.rows.size(), 14u);  // five layouts, tpla in ten ways
  for (const auto& row : layouts.rows) {
    const bool exact =
        row.at(0).text.starts_with("tp:") || row.at(0).text.starts_with("kvp") || row.at(0).text.starts_with("exact");
    EXPECT_EQ(row.at(5).number.value() == 0, exact) << row.at(0).text;
    // Output's all-reduce of 2048 bfloat16 values on two ranks; kvp sends queries and partial outputs besides.
    EXPECT_GE(row.at(3).number.value(), 2 * 2048 * (2 - 1) / 2 * 2.0) << row.at(0).text;
  }
  const EvidenceTable& curve = report.claims[1].evidence.at(0);
  ASSERT_EQ(curve.rows.size(), 12u);  // six numbers of shared columns, two of shards
  for (const std::size_t first : {0, 6}) {
    for (std::size_t i = first + 1; i < first + 6; ++i) {
      EXPECT_LT(curve.rows[i - 1].at(2).number.value(), curve.rows[i].at(2).number.value());  // more cache
    }
    // In the end nearly nothing is cut.
    EXPECT_LT(curve.rows[first + 5].at(3).number.value(), curve.rows[first].at(3).number.value());
    EXPECT_LT(curve.rows[first + 5].at(5).number.value(), curve.rows[first].at(5).number.value());
  }
}

TEST(TplaClaims, OnlyNamesWhatThereIs) {
  EXPECT_EQ(tpla_claims({.only = {"T6"}}).claims.size(), 1u);
  EXPECT_THROW(tpla_claims({.only = {"T13"}}), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
