#include "sharding/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "sharding/sequence_layout.h"

namespace isomer {
namespace {

using ::testing::HasSubstr;

TEST(Layout, ReadsAxesSizesAndOptions) {
  const Layout layout = parse_layout("helix:kvp=8,tpa=1,ring:2,q=gather");
  ASSERT_EQ(layout.axes.size(), 2u);
  EXPECT_EQ(layout.innermost().name, "helix");
  EXPECT_EQ(layout.innermost().size, 0);
  EXPECT_EQ(layout.option("kvp", ""), "8");
  EXPECT_EQ(layout.option("tpa", ""), "1");
  EXPECT_EQ(layout.option("ep", "1"), "1");
  EXPECT_EQ(layout.axes[1].name, "ring");
  EXPECT_EQ(layout.axes[1].size, 2);
  EXPECT_EQ(layout.axes[1].options.at("q"), "gather");
}

TEST(Layout, TakesABareSettingForTheAxisBeforeIt) {
  const Layout layout = parse_layout("laga:4,v=view,attention=eager");
  EXPECT_EQ(layout.axes.size(), 1u);
  EXPECT_EQ(layout.innermost().size, 4);
  EXPECT_EQ(layout.option("v", ""), "view");
  EXPECT_EQ(layout.option("attention", "fused"), "eager");
}

TEST(Layout, HasOneCanonicalText) {
  EXPECT_EQ(to_string(parse_layout(" laga : 4 , v = view ")), "laga:4,v=view");
  EXPECT_EQ(to_string(parse_layout("laga:v=view,attention=eager")), "laga:attention=eager,v=view");
  EXPECT_EQ(to_string(parse_layout("tpla:g=2,tp:2")), "tpla:g=2,tp:2");
  EXPECT_EQ(to_string(parse_layout("laga")), "laga");
}

TEST(Layout, SemicolonsSeparateLayouts) {
  const auto layouts = parse_layouts("explicit; laga:4,v=view ;absorbed:attention=eager");
  ASSERT_EQ(layouts.size(), 3u);
  EXPECT_EQ(to_string(layouts[1]), "laga:4,v=view");
  EXPECT_THROW(parse_layouts("laga;;explicit"), std::invalid_argument);
  EXPECT_THROW(parse_layouts("laga;"), std::invalid_argument);
}

std::string random_word() {
  const auto letter = rc::gen::elementOf(std::string("abcxyzABZ0189-_."));
  return *rc::gen::nonEmpty(rc::gen::container<std::string>(letter));
}

TEST(Layout, ComesBackFromItsText) {
  const auto property = [] {
    Layout layout;
    const int num_axes = *rc::gen::inRange(1, 4);
    for (int i = 0; i < num_axes; ++i) {
      LayoutAxis axis{.name = random_word(), .size = *rc::gen::element(0, 1, 2, 64, 1 << 20)};
      const int num_options = *rc::gen::inRange(0, 4);
      for (int option = 0; option < num_options; ++option) axis.options[random_word()] = random_word();
      layout.axes.push_back(axis);
    }
    const Layout again = parse_layout(to_string(layout));
    RC_ASSERT(again.axes.size() == layout.axes.size());
    for (std::size_t i = 0; i < layout.axes.size(); ++i) {
      RC_ASSERT(again.axes[i].name == layout.axes[i].name);
      RC_ASSERT(again.axes[i].size == layout.axes[i].size);
      RC_ASSERT(again.axes[i].options == layout.axes[i].options);
    }
  };
  EXPECT_TRUE(rc::check("parse_layout(to_string(l)) is l", property));
}

TEST(Layout, NeverCrashesOnAnyText) {
  const auto property = [] {
    const auto text = *rc::gen::container<std::string>(rc::gen::elementOf(std::string("ab:,=;1 9-\t\"é")));
    try {
      RC_ASSERT(!to_string(parse_layout(text)).empty());
    } catch (const std::invalid_argument& error) {
      RC_ASSERT(std::string(error.what()).starts_with("layout '"));
    }
  };
  EXPECT_TRUE(rc::check("parse_layout reads or refuses", property));
}

TEST(Layout, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> kWrong[] = {
      {"", "expected a name"},
      {" ", "expected a name"},
      {":4", "expected a name"},
      {"laga:", "number of ranks"},
      {"laga:0", "'0'"},
      {"laga:-2", "'-2'"},
      {"laga:4x", "'4x'"},
      {"laga:1.5", "'1.5'"},
      {"laga:99999999999", "1048576"},
      {"v=view", "before any axis"},
      {"laga,", "expected a name"},
      {"laga:4,,ring", "expected a name"},
      {"laga:v=", "not key=value"},
      {"laga:=view", "not key=value"},
      {"laga:v=a b", "not key=value"},
      {"laga:v=view,v=copy", "given twice"},
      {"la ga:2", "expected a name"},
      {"laga:4:2", "'4:2'"},
  };
  for (const auto& [text, part] : kWrong) {
    try {
      parse_layout(text);
      ADD_FAILURE() << "'" << text << "' was accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("layout '{}'", text)));
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  }
}

TEST(BalancedPart, PartsTileTheWholeAndDifferByOneAtMost) {
  const auto property = [] {
    const std::int64_t total = *rc::gen::inRange(0, 1000), parts = *rc::gen::inRange(1, 40);
    std::int64_t at = 0;
    for (std::int64_t index = 0; index < parts; ++index) {
      const IndexRange part = balanced_part(total, parts, index);
      RC_ASSERT(part.begin == at);
      RC_ASSERT(part.count == total / parts + (index < total % parts ? 1 : 0));
      at = part.end();
    }
    RC_ASSERT(at == total);
  };
  EXPECT_TRUE(rc::check("balanced_part", property));
}

TEST(TokenShards, RowsOfABatchLieTogether) {
  const TokenShards shards{.seq = 11, .batch = 3, .ranks_per_group = 4};  // 3, 3, 3, 2 tokens
  EXPECT_EQ(shards.total_rows(), 33);
  ASSERT_EQ(shards.positions(3).size(), 1u);
  EXPECT_EQ(shards.positions(3)[0].begin, 9);
  EXPECT_EQ(shards.positions(3)[0].count, 2);
  std::int64_t row = 0;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(shards.rows_in_group(rank, 0).begin, row);
    EXPECT_EQ(shards.rows_in_group(rank, 0).count, shards.positions(rank)[0].count * 3);
    EXPECT_EQ(shards.rows(rank), shards.rows_in_group(rank, 0).count);
    row = shards.rows_in_group(rank, 0).end();
  }
  EXPECT_EQ(row, 33);
}

TEST(TokenShards, GroupsHaveAnEarlyAndALatePart) {
  const TokenShards shards{.seq = 16, .batch = 1, .ranks_per_group = 2, .num_groups = 2};  // parts of 4
  const auto first = shards.group_positions(0), second = shards.group_positions(1);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].begin, 0);
  EXPECT_EQ(first[0].count, 4);
  EXPECT_EQ(first[1].begin, 12);
  EXPECT_EQ(first[1].count, 4);
  ASSERT_EQ(second.size(), 1u);  // parts 1 and 2 are neighbours
  EXPECT_EQ(second[0].begin, 4);
  EXPECT_EQ(second[0].count, 8);
  ASSERT_EQ(shards.positions(1).size(), 1u);
  EXPECT_EQ(shards.positions(1)[0].begin, 12);
  EXPECT_EQ(shards.rows_in_group(1, 0).begin, 4);
}

TEST(TokenShards, RanksTileTheSequence) {
  const auto property = [] {
    const TokenShards shards{.seq = *rc::gen::inRange(0, 90),
                             .batch = *rc::gen::inRange(1, 4),
                             .ranks_per_group = *rc::gen::inRange(1, 6),
                             .num_groups = *rc::gen::inRange(1, 9)};
    std::vector<int> owners(static_cast<std::size_t>(shards.seq));
    for (int rank = 0; rank < shards.num_ranks(); ++rank) {
      std::int64_t count = 0, before = -1;
      RC_ASSERT(shards.positions(rank).size() <= 2u);
      for (const IndexRange& range : shards.positions(rank)) {
        RC_ASSERT(range.count > 0 && range.begin > before);
        before = range.end();
        count += range.count;
        for (std::int64_t i = range.begin; i < range.end(); ++i) ++owners[static_cast<std::size_t>(i)];
      }
      RC_ASSERT(count == shards.count(rank));
      RC_ASSERT(shards.rows(rank) == count * shards.batch);
    }
    for (const int owner : owners) RC_ASSERT(owner == 1);
    // Causal work: an early and a late part each, and so much the same for all groups.
    for (int group = 0; group < shards.num_groups; ++group)
      RC_ASSERT(std::abs(shards.group_count(group) - shards.group_count(0)) <= 2);
  };
  EXPECT_TRUE(rc::check("every token has one owner", property));
}

TEST(SequenceLayout, AxesMakeInnerRanksGroupsAndReplicas) {
  const SequenceLayout both = sequence_layout(parse_layout("laga:4,ring:3,dp:2"));
  EXPECT_EQ(both.inner_ranks, 4);
  EXPECT_EQ(both.outer_groups, 3);
  EXPECT_EQ(both.data_replicas, 2);
  EXPECT_EQ(both.num_ranks(), 24);
  EXPECT_EQ(sequence_layout(parse_layout("ring:8")).outer_groups, 8);
  EXPECT_EQ(sequence_layout(parse_layout("ring:8")).inner_ranks, 1);
  EXPECT_EQ(sequence_layout(parse_layout("laga,dp:2"), 8).inner_ranks, 4);  // what the others leave
  EXPECT_EQ(to_string(sized_layout(parse_layout("laga:2,ring"), 6)), "laga:2,ring:3");
}

TEST(SequenceLayout, RefusesAxesThatDoNotFitTogether) {
  for (const std::string text :
       {"laga:2,dp:2,ring:2", "ring:2,latent-ring:2", "laga:2,explicit:2", "laga:2,ring:2,ring:2"})
    EXPECT_THROW(sequence_layout(parse_layout(text)), std::invalid_argument) << text;
  EXPECT_THROW(sequence_layout(parse_layout("laga:4"), 8), std::invalid_argument);
  EXPECT_THROW(sequence_layout(parse_layout("laga:3,ring"), 8), std::invalid_argument);
  EXPECT_THROW(sequence_layout(parse_layout("laga,ring"), 8), std::invalid_argument);
}

TEST(HeadShards, AreEqual) {
  const HeadShards shards{.num_heads = 12, .num_ranks = 4};
  EXPECT_EQ(shards.per_rank(), 3);
  EXPECT_EQ(shards.heads(2).begin, 6);
  EXPECT_EQ(shards.heads(2).count, 3);
}

}  // namespace
}  // namespace isomer
