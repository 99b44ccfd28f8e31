// Helix's claims: figures that must come out, and a report that is whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cost/roofline.h"
#include "study/claims_helix.h"

namespace isomer {
namespace {

TEST(HelixRoofline, GivesTheAppendixsFigures) {
  const HelixRoofline r{.batch = 8,
                        .query_heads = 128,
                        .kv_heads = 8,
                        .head_dim = 128,
                        .hidden = 16384,
                        .ffn = 65536,
                        .context = 1e6,
                        .element_bytes = 0.5,
                        .bandwidth_bytes_per_s = 8e12};
  EXPECT_NEAR(1e6 * r.cache_read_s(8, 1), 128, 1e-9);
  EXPECT_NEAR(1e6 * r.cache_read_s(64, 1), 128, 1e-9);  // ⌈8/64⌉ heads: no less
  EXPECT_NEAR(1e6 * r.cache_read_s(8, 8), 16, 1e-9);
  EXPECT_NEAR(1e6 * r.weight_read_s(8, 8), 29.6, 0.05);
  EXPECT_NEAR(1e6 * r.weight_read_s(8, 64), 7.6, 0.05);
  EXPECT_NEAR(1e6 * r.weight_read_of_method_s(8, 64, 64), 5.8, 0.05);
}

TEST(HelixClaims, QuickReportIsWhole) {
  const ClaimsReport report = helix_claims({.quick = true});
  ASSERT_EQ(report.claims.size(), 12u);
  for (const Claim& claim : report.claims) {
    EXPECT_FALSE(claim.claim.empty() || claim.published.empty() || claim.found.empty() || claim.reason.empty())
        << claim.id;
    for (const EvidenceTable& table : claim.evidence) {
      EXPECT_FALSE(table.rows.empty()) << claim.id;
      for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.header.size()) << claim.id << ": " << table.title;
    }
  }
  const auto verdict = [&](const std::string& id) {
    return std::find_if(report.claims.begin(), report.claims.end(), [&](const Claim& c) { return c.id == id; })
        ->verdict;
  };
  EXPECT_EQ(verdict("H5"), Verdict::reproduced);
  EXPECT_EQ(verdict("H10"), Verdict::reproduced);
  for (const char* id : {"H1", "H2", "H3"}) EXPECT_EQ(verdict(id), Verdict::reproduced) << id;
  for (const char* id : {"H11", "H12"}) EXPECT_EQ(verdict(id), Verdict::explained_otherwise) << id;
  EXPECT_NE(verdict("H6"), Verdict::cannot_be_tested_here);
  EXPECT_EQ(to_json(report).at("command"), "claims helix");
}

TEST(HelixClaims, OnlyNamesWhatThereIs) {
  EXPECT_EQ(helix_claims({.only = {"H5"}}).claims.size(), 1u);
  EXPECT_THROW(helix_claims({.only = {"H13"}}), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
