#include "sharding/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "sharding/tokens.h"

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
  const TokenShards shards{.seq = 11, .batch = 3, .num_ranks = 4};  // 3, 3, 3, 2 tokens
  EXPECT_EQ(shards.total_rows(), 33);
  EXPECT_EQ(shards.positions(3).begin, 9);
  EXPECT_EQ(shards.positions(3).count, 2);
  std::int64_t row = 0;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(shards.rows(rank).begin, row);
    EXPECT_EQ(shards.rows(rank).count, shards.positions(rank).count * 3);
    row = shards.rows(rank).end();
  }
  EXPECT_EQ(row, 33);
}

TEST(HeadShards, AreEqual) {
  const HeadShards shards{.num_heads = 12, .num_ranks = 4};
  EXPECT_EQ(shards.per_rank(), 3);
  EXPECT_EQ(shards.heads(2).begin, 6);
  EXPECT_EQ(shards.heads(2).count, 3);
}

}  // namespace
}  // namespace isomer
