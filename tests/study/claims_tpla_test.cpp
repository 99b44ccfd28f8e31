// TPLA's claims: those that are priced have figures, the others say what they wait for.
#include <gtest/gtest.h>

#include "study/claims_tpla_priced.h"
#include "study/claims_tpla_quality.h"

namespace isomer {
namespace {

TEST(TplaClaims, WaitingRowsHaveNoFiguresAndTheOthersHave) {
  const ClaimsReport report = tpla_claims({});
  ASSERT_EQ(report.claims.size(), 12u);
  for (const Claim& claim : report.claims) {
    const bool priced = claim.id == "T5" || claim.id == "T6";
    const bool waits = claim.id == "T12";
    EXPECT_FALSE(claim.claim.empty() || claim.published.empty() || claim.found.empty()) << claim.id;
    EXPECT_EQ(claim.verdict == Verdict::cannot_be_tested_here, priced || waits) << claim.id;
    EXPECT_EQ(claim.found == "-", waits) << claim.id;
    EXPECT_EQ(claim.evidence.empty(), waits) << claim.id;
    for (const EvidenceTable& table : claim.evidence) {
      for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size()) << claim.id;
    }
  }
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
  ASSERT_EQ(curve.rows.size(), 6u);
  // More columns on every rank: more cache, and in the end nearly nothing that is cut.
  EXPECT_LT(curve.rows.at(0).at(2).number.value(), curve.rows.at(2).at(2).number.value());
  EXPECT_LT(curve.rows.at(2).at(3).number.value(), curve.rows.at(0).at(3).number.value());
}

TEST(TplaClaims, OnlyNamesWhatThereIs) {
  EXPECT_EQ(tpla_claims({.only = {"T6"}}).claims.size(), 1u);
  EXPECT_THROW(tpla_claims({.only = {"T13"}}), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
