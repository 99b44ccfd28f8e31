// Ranks that are said to do the same in a step do: traced all, they send and keep what the one traced for them does.
#include "study/equal_ranks.h"

#include <gtest/gtest.h>

#include <set>

#include "study/compare_decode.h"

namespace isomer {
namespace {

ModelConfig odd_config() {
  ModelConfig c = load_model_config("tiny-mla");
  c.hidden_size = 50;  // uneven shares of every sum
  c.intermediate_size = 37;
  c.num_attention_heads = c.num_key_value_heads = 12;
  c.num_hidden_layers = 7;
  return c;
}

DecodeRun traced(const DecodeWorkload& w, const DecodeLayout& layout, const std::vector<int>& equal) {
  DecodeRunOptions run{.layout = layout, .equal_ranks = equal};
  run.read = {std::vector<std::int32_t>(static_cast<std::size_t>(w.batch), 1)};
  run.group.num_ranks = layout.devices();
  run.group.dry_run = true;
  return run_decode(w, initial_model_weights(w.config, 1, w.dtype, 0.02, true), run);
}

TEST(EqualRanks, DoTheSame) {
  DecodeWorkload w{.config = odd_config(), .dtype = DType::bf16, .context = 1000, .batch = 5, .tokens = 1};
  int layouts = 0, merged = 0;
  for (const int ranks : {2, 3, 4, 6, 12}) {
    auto texts = all_decode_layouts(w.config, ranks);
    texts.insert(texts.end(), {"tp:2,pp:2", "helix:kvp=3,tpa=2", "helix:kvp=3,tpa=2,ep=2,experts=gather", "pp:4"});
    for (const std::string& text : texts) {
      const DecodeLayout layout = parse_decode_layout(text, w.config);
      if (!why_step_unfit(layout, w.config).empty() || layout.pp > w.batch) continue;
      const std::vector<int> equal = equal_ranks(w.config, layout, w.batch, w.context + 1);
      const DecodeRun one = traced(w, layout, equal), all = traced(w, layout, {});
      ASSERT_EQ(one.ranks.size(), all.ranks.size());
      for (std::size_t rank = 0; rank < all.ranks.size(); ++rank) {
        EXPECT_EQ(one.ranks[rank].rank, all.ranks[rank].rank);
        EXPECT_EQ(one.ranks[rank].bytes_by_name, all.ranks[rank].bytes_by_name) << text << " rank " << rank;
        EXPECT_EQ(one.ranks[rank].messages, all.ranks[rank].messages) << text << " rank " << rank;
        EXPECT_EQ(one.ranks[rank].cache_bytes, all.ranks[rank].cache_bytes) << text << " rank " << rank;
        merged += equal[rank] != static_cast<int>(rank) ? 1 : 0;
      }
      ++layouts;
    }
  }
  EXPECT_GT(layouts, 40);
  EXPECT_GT(merged, 40);  // else nothing was tested
}

TEST(EqualRanks, AreFewWhereAllDivides) {
  const ModelConfig r1 = load_model_config("deepseek-r1");
  const auto classes = [&](const char* layout) {
    const std::vector<int> equal = equal_ranks(r1, parse_decode_layout(layout, r1), 64, 1 << 20);
    return std::set<int>(equal.begin(), equal.end()).size();
  };
  EXPECT_EQ(classes("tp:64"), 1u);
  EXPECT_EQ(classes("helix:kvp=64,tpa=1,tpf=8,ep=8"), 1u);
  EXPECT_EQ(classes("medha:kvp=64,tpa=1"), 2u);
  EXPECT_EQ(classes("dp-ep:64"), 64u);
  EXPECT_EQ(classes("pp:4"), 3u);  // 13 layers of experts behind 3 dense ones, 15 in the middle twice, 15 at the end
}

}  // namespace
}  // namespace isomer
