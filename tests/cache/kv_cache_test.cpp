#include "cache/kv_cache.h"

#include <gmock/gmock.h>

#include <cmath>
#include <set>

#include "tensor_values.h"

namespace isomer {
namespace {

using Growth = KvCache::Growth;

using ::testing::HasSubstr;
using testing::noise_values;
using testing::tensor_of;
using testing::values_of;

TEST(CacheShards, DealsChunksRoundRobinByGlobalPosition) {
  for (const int slices : {1, 2, 3, 7}) {
    for (const std::int64_t chunk : {1, 5, 16}) {
      const CacheShards shards{slices, chunk};
      std::vector<std::int64_t> given(static_cast<std::size_t>(slices), 0);
      for (std::int64_t p = 0; p < 200; ++p) {
        const int owner = shards.owner(p);
        ASSERT_EQ(owner, p / chunk % slices);
        EXPECT_EQ(shards.place(p), given[static_cast<std::size_t>(owner)]++);
        for (int s = 0; s < slices; ++s) EXPECT_EQ(shards.count(s, p + 1), given[static_cast<std::size_t>(s)]);
      }
    }
  }
}

TEST(CacheShards, RangesOfAllSlicesAreTheWhole) {
  for (const int slices : {1, 2, 3, 7}) {
    const CacheShards shards{slices, 4};
    for (const auto& [begin, end] : {std::pair{0, 0}, {0, 1}, {3, 4}, {5, 61}, {16, 16}, {59, 90}}) {
      std::set<std::int64_t> seen;
      for (int s = 0; s < slices; ++s) {
        for (const IndexRange& range : shards.ranges(s, begin, end)) {
          for (std::int64_t p = range.begin; p < range.end(); ++p) {
            EXPECT_EQ(shards.owner(p), s);
            EXPECT_TRUE(seen.insert(p).second);
          }
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), end - begin);
      if (!seen.empty()) {
        EXPECT_EQ(*seen.begin(), begin);
        EXPECT_EQ(*seen.rbegin(), end - 1);
      }
    }
  }
}

CacheOptions small_options(bool latent, CacheShards shards = {}, int slice = 0) {
  CacheOptions o{.num_layers = 2, .row = {2, 5, 3, false}, .page_tokens = 8, .num_pages = 9};
  if (latent) o.row = {1, 7, 4, true};
  o.shards = shards;
  o.slice = slice;
  return o;
}

/// Rows written in uneven pieces into interleaved sequences come back as they were, whatever the pages; nothing that
/// was not written is read.
void check_roundtrip(bool latent, CacheShards shards, int slice, DType dtype) {
  RankContext ctx({});
  ctx.memory().poison = true;
  CacheOptions options = small_options(latent, shards, slice);
  options.dtype = dtype;
  KvCache cache(ctx, options);
  const int gone = cache.add_sequence(), a = cache.add_sequence(), b = cache.add_sequence();
  const Growth first{gone, 21};
  cache.grow({&first, 1});
  const auto row = [&](int sequence, std::int64_t layer, std::int64_t position, std::int64_t width) {
    return testing::rounded(noise_values(static_cast<std::uint64_t>(1000 * sequence + 100 * layer + width), 64 * width),
                            dtype)[static_cast<std::size_t>(position * width)];
  };
  const auto rows = [&](int sequence, std::int64_t layer, std::int64_t begin, std::int64_t count, std::int64_t width) {
    const std::int64_t all = options.row.num_heads * width;
    std::vector<double> values;
    for (std::int64_t p = begin; p < begin + count; ++p) {
      for (std::int64_t i = 0; i < all; ++i) values.push_back(row(sequence, layer, p, width) + (i % 2 ? 1 : 0));
    }
    return tensor_of(values, DType::f32, {count, options.row.num_heads, width});
  };
  cache.remove_sequence(ctx, gone);
  for (const auto& [sequence, tokens] : {Growth{a, 5}, Growth{b, 1}, Growth{a, 17}, Growth{b, 9}, Growth{a, 1}}) {
    const std::int64_t begin = cache.length(sequence);
    const Growth growth{sequence, tokens};
    cache.grow({&growth, 1});
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      cache.store(ctx, layer, sequence, begin, rows(sequence, layer, begin, tokens, options.row.key_width),
                  latent ? Tensor() : rows(sequence, layer, begin, tokens, options.row.value_width));
    }
  }
  for (const int sequence : {a, b}) {
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      for (const auto& range : shards.ranges(slice, 2, cache.length(sequence))) {
        const Tensor keys = tensor_of(std::vector<double>(range.count * options.row.num_heads * options.row.key_width),
                                      DType::f32, {range.count, options.row.num_heads, options.row.key_width});
        const Tensor values =
            tensor_of(std::vector<double>(range.count * options.row.num_heads * options.row.value_width), DType::f32,
                      {range.count, options.row.num_heads, options.row.value_width});
        cache.load(ctx, layer, sequence, range.begin, range.end(), keys, values);
        const auto expected = [&](std::int64_t width) {
          return testing::rounded(values_of(rows(sequence, layer, range.begin, range.count, width)), dtype);
        };
        EXPECT_EQ(values_of(keys), expected(options.row.key_width));
        if (latent) continue;
        EXPECT_EQ(values_of(values), expected(options.row.value_width));
      }
    }
  }
}

TEST(KvCache, RowsComeBackAsTheyWereWritten) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    check_roundtrip(true, {}, 0, dtype);
    check_roundtrip(false, {}, 0, dtype);
    for (int slice = 0; slice < 3; ++slice) {
      check_roundtrip(true, {3, 4}, slice, dtype);
      check_roundtrip(false, {3, 3}, slice, dtype);
    }
  }
}

TEST(KvCache, PagesOfAGoneSequenceArePoison) {
  RankContext ctx({});
  ctx.memory().poison = true;
  KvCache cache(ctx, small_options(true));
  const int id = cache.add_sequence();
  const Growth growth{id, 10};
  cache.grow({&growth, 1});
  cache.store(ctx, 0, id, 0, tensor_of(std::vector<double>(70, 1.0), DType::f32, {10, 1, 7}), {});
  const auto runs = cache.runs(id, 0, 10);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(values_of(cache.keys(0).slice(0, runs[1].row, 2)), std::vector<double>(14, 1.0));
  cache.truncate(ctx, id, 8);
  EXPECT_TRUE(std::isnan(values_of(cache.keys(0).slice(0, runs[1].row, 1))[0]));
  EXPECT_EQ(cache.num_free_pages(), 8);
  cache.remove_sequence(ctx, id);
  EXPECT_TRUE(std::isnan(values_of(cache.keys(0).slice(0, runs[0].row, 1))[0]));
  EXPECT_EQ(cache.num_free_pages(), 9);
}

template <class Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(KvCache, TooSmallNamesCapacityAndNeedAndChangesNothing) {
  for (int slice = 0; slice < 2; ++slice) {
    RankContext ctx({});
    KvCache cache(ctx, small_options(true, {2, 16}, slice));
    const int a = cache.add_sequence(), b = cache.add_sequence();
    // 9 pages of 8 on each of two slices: a takes 32 + 32, so 8 tokens are left on each slice.
    const Growth first{a, 128};
    cache.grow({&first, 1});
    const Growth second[] = {{a, 8}, {b, 1}};
    const std::string message = message_of([&] { cache.grow(second); });
    // The first slice is short, which both must notice.
    EXPECT_THAT(message, HasSubstr("9 more tokens beside 128"));
    EXPECT_THAT(message, HasSubstr("10 pages of 8 tokens on slice 0 of 2, there are 9"));
    EXPECT_EQ(cache.length(a), 128);
    EXPECT_EQ(cache.length(b), 0);
    EXPECT_EQ(cache.num_free_pages(), 1);
    const Growth third{b, 8};
    cache.grow({&third, 1});
    EXPECT_EQ(cache.num_free_pages(), slice == 0 ? 0 : 1);
  }
}

TEST(KvCache, MemoryIsOfItsClassAlsoInADryRun) {
  for (const bool dry : {false, true}) {
    RankContext ctx({.dry_run = dry});
    KvCache latent(ctx, small_options(true));
    EXPECT_EQ(ctx.memory().current_bytes(MemoryClass::cache), 2 * 9 * 8 * 7 * 4);
    KvCache grouped(ctx, small_options(false));
    EXPECT_EQ(ctx.memory().current_bytes(MemoryClass::cache), 2 * 9 * 8 * (7 + 2 * (5 + 3)) * 4);
    EXPECT_EQ(ctx.memory().peak_activation_bytes(), 0);
  }
}

TEST(KvCache, ComplaintsNameTheValue) {
  RankContext ctx({});
  CacheOptions options = small_options(true);
  options.num_pages = 0;
  EXPECT_THAT(message_of([&] { KvCache(ctx, options); }), HasSubstr("num_pages is 0"));
  KvCache cache(ctx, small_options(true));
  EXPECT_THAT(message_of([&] { cache.length(3); }), HasSubstr("no sequence 3"));
  const int id = cache.add_sequence();
  EXPECT_THAT(message_of([&] { cache.truncate(ctx, id, 1); }), HasSubstr("has 0 positions"));
}

}  // namespace
}  // namespace isomer
