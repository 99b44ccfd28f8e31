// Every scheme against one rank in float64: outputs, all gradients, bytes and memory; over ranks, uneven shards, cores
// and types.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "full_tests.h"
#include "parallel/block_fixture.h"
#include "parallel/sequence/scheme.h"
#include "study/machine.h"

namespace isomer {
namespace {

using testing::compare_options;
using testing::seeded_data;
using testing::small_config;
using testing::small_problem;

const auto kQuiet = [](const std::string&) {};

struct Case {
  std::string layout;
  int ranks;
  bool divisible;
  AttentionCore core;
  DType dtype;
  std::int64_t heads;
  std::int64_t batch = 2;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = fmt::format("{}_P{}_h{}_b{}_{}_{}_{}", c.layout, c.ranks, c.heads, c.batch,
                                 c.divisible ? "even" : "uneven", name_of(c.core), name_of(c.dtype));
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return name;
}

/// Heads that every tested number of ranks divides in some size.
std::int64_t heads_for(int ranks) { return ranks == 3 ? 6 : ranks == 7 ? 7 : 8; }

constexpr DType kDTypes[] = {DType::f32, DType::bf16};

/// Schemes that spread heads over all ranks.
void add_by_heads(std::vector<Case>& cases) {
  for (const std::string layout : {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga",
                                   "laga:v=view", "laga:kv=strided", "laga:kv=rebuild"}) {
    for (int ranks : {1, 2, 3, 4, 7, 8}) {
      for (bool divisible : {true, false}) {
        if (divisible && ranks != 4 && !testing::full_tests()) continue;
        for (AttentionCore core : {AttentionCore::eager, AttentionCore::fused}) {
          for (DType dtype : kDTypes) cases.push_back({layout, ranks, divisible, core, dtype, heads_for(ranks)});
        }
      }
    }
  }
}

/// Schemes that keep all heads, on ranks below and beyond the number of heads.
void add_all_heads(std::vector<Case>& cases) {
  for (const std::string layout : {"ring", "latent-gather", "latent-gather:kv=kept", "latent-gather:rows=7",
                                   "latent-ring", "latent-ring:rows=5", "ring:recompute=up-projection"}) {
    for (int ranks : {1, 2, 3, 4, 8}) {
      for (DType dtype : kDTypes) {
        for (std::int64_t batch : {1, 3}) {
          if (batch == 1 && ranks % 2 == 0 && !testing::full_tests()) continue;
          cases.push_back({layout, ranks, false, AttentionCore::fused, dtype, 3, batch});
        }
        if (testing::full_tests()) cases.push_back({layout, ranks, true, AttentionCore::fused, dtype, 4, 2});
      }
    }
  }
}

/// Groups of inner ranks, and rings between them.
void add_two_dimensional(std::vector<Case>& cases) {
  constexpr int kSizes[][2] = {{2, 2}, {4, 2}, {2, 3}, {1, 3}, {3, 1}};
  for (const auto& [inner, outer] : kSizes) {
    for (const std::string name : {"explicit:{},ring:{}", "laga:{},ring:{}", "laga:{},kv=rebuild,ring:{}",
                                   "laga:{},latent-ring:{}", "laga:{},latent-ring:{},rows=6"}) {
      const std::string layout = fmt::format(fmt::runtime(name), inner, outer);
      for (DType dtype : kDTypes) {
        cases.push_back({layout, inner * outer, false, AttentionCore::fused, dtype, inner == 3 ? 6 : 4, 3});
        if (testing::full_tests())
          cases.push_back({layout, inner * outer, true, AttentionCore::fused, dtype, inner == 3 ? 6 : 4, 1});
      }
    }
  }
}

void add_recomputed(std::vector<Case>& cases) {
  for (const std::string what : {"attention", "block"}) {
    for (const std::string name :
         {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga", "laga:kv=strided", "ring",
          "latent-gather", "latent-ring", "laga:2,ring:2", "laga:2,latent-ring:2"}) {
      const std::string layout = fmt::format("{}{}recompute={}", name, name.find(':') < name.size() ? "," : ":", what);
      const bool two = name.find(":2") < name.size(), parts = name.find("ring") < name.size() || name[1] == 'a';
      for (int ranks : {1, 2, 4}) {
        if ((two && ranks != 4) || (ranks == 2 && !testing::full_tests())) continue;
        cases.push_back({layout, ranks, false, AttentionCore::fused, DType::f32, 4});
        if (ranks == 4) cases.push_back({layout, ranks, false, AttentionCore::fused, DType::bf16, 4});
        if (!parts) cases.push_back({layout, ranks, false, AttentionCore::eager, DType::f32, 4});
      }
    }
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_by_heads(cases);
  add_all_heads(cases);
  add_two_dimensional(cases);
  add_recomputed(cases);
  return cases;
}

class Schemes : public ::testing::TestWithParam<Case> {
 protected:
  BlockProblem problem() const {
    const Case& c = GetParam();
    const std::int64_t seq = c.divisible ? 24 + (c.ranks == 7 ? 4 : 0) : 29;
    // Where a projection or norm is absent alternates with the number of ranks.
    const ModelConfig config = small_config(c.heads, c.ranks % 2 == 0 ? 20 : 0, c.ranks != 4);
    return small_problem(config, seq, c.dtype, c.core, c.batch);
  }
};

TEST_P(Schemes, AgreeWithOneRankAndWithTheirAccounts) {
  const Case& c = GetParam();
  const BlockProblem p = problem();
  const BlockData data = seeded_data(p);
  for (MemoryPolicy policy : {MemoryPolicy::lean, MemoryPolicy::framework_eager}) {
    CompareOptions options = compare_options(p, c.ranks, c.layout);
    options.group.memory_policy = policy;
    const CompareReport report = compare_schemes(options, data, kQuiet);
    ASSERT_EQ(report.schemes.size(), 1u) << (report.omitted.empty() ? "" : report.omitted[0].reason);
    const SchemeReport& scheme = report.schemes[0];
    const std::size_t num_weights = [&] {
      std::size_t count = 0;
      data.weights.for_each([&](std::string_view, const Tensor&) { ++count; });
      return count;
    }();
    EXPECT_EQ(scheme.errors.size(), num_weights + 2);  // every gradient, y and dx
    for (const TensorError& e : scheme.errors) {
      EXPECT_TRUE(std::isfinite(e.max_abs)) << e.tensor;
      EXPECT_LE(e.max_abs, e.bound) << e.tensor;
      EXPECT_GT(e.max_reference, 0) << e.tensor;
      // The bound itself must be a tight one: in float32 rounding, not a wrong formula, sets it.
      EXPECT_LT(e.bound, (p.dtype == DType::f32 ? 1e-4 : 0.4) * e.max_reference) << e.tensor;
    }
    EXPECT_TRUE(scheme.bytes_agree) << scheme.bytes_sent << " sent, closed form " << scheme.bytes_predicted;
    EXPECT_TRUE(scheme.peak_agrees);
    EXPECT_EQ(c.ranks == 1, scheme.bytes_sent == 0);
  }
}

TEST_P(Schemes, FailWithoutTheirCommunication) {
  const Case& c = GetParam();
  if (c.ranks == 1) GTEST_SKIP() << "one rank sends nothing";
  if (c.dtype == DType::bf16) GTEST_SKIP() << "covered in float32";
  const BlockProblem p = problem();
  const BlockData data = seeded_data(p);
  BlockRunOptions options;
  options.group = compare_options(p, c.ranks, c.layout).group;
  options.repetitions = 1;
  const Layout layout = parse_layout(c.layout);
  const BlockRun intact = run_block(p, data, layout, options);
  options.drop_transfers = true;
  options.poison_memory = true;
  const BlockRun broken = run_block(p, data, layout, options);
  const auto* a = intact.y.data<float>();
  const auto* b = broken.y.data<float>();
  double difference = 0;
  for (std::int64_t i = 0; i < intact.y.numel(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    difference = std::isnan(d) ? INFINITY : std::max(difference, d);
  }
  EXPECT_GT(difference, 0.1);
}

INSTANTIATE_TEST_SUITE_P(Grid, Schemes, ::testing::ValuesIn(all_cases()), case_name);

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.nbytes())) == 0;
}

void expect_same_bits(const BlockRun& a, const BlockRun& b) {
  EXPECT_TRUE(same_bits(a.y, b.y)) << "y";
  EXPECT_TRUE(same_bits(a.dx, b.dx)) << "dx";
  std::map<std::string, Tensor> gradients;
  a.gradients.for_each([&](std::string_view name, const Tensor& t) { gradients[std::string(name)] = t; });
  b.gradients.for_each([&](std::string_view name, const Tensor& t) {
    EXPECT_TRUE(same_bits(gradients.at(std::string(name)), t)) << name;
  });
}

class Bits : public ::testing::TestWithParam<std::tuple<std::string, AttentionCore, DType>> {};

TEST_P(Bits, DependNeitherOnTheRunNorOnTheThreadBudgetNorOnMemoryBeneath) {
  const auto& [layout, core, dtype] = GetParam();
  // Large enough for several tiles and blocks, so that threads have something to share.
  ModelConfig config = small_config(4);
  config.hidden_size = 600;
  const BlockProblem p = small_problem(config, 270, dtype, core);
  const BlockData data = seeded_data(p);
  BlockRunOptions options;
  options.repetitions = 1;
  options.group.num_ranks = 2;
  options.group.threads_per_rank = 1;
  const BlockRun first = run_block(p, data, parse_layout(layout), options);
  expect_same_bits(first, run_block(p, data, parse_layout(layout), options));
  options.poison_memory = true;
  for (int threads : {2, 3}) {
    options.group.threads_per_rank = threads;
    expect_same_bits(first, run_block(p, data, parse_layout(layout), options));
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, Bits,
                         ::testing::Combine(::testing::Values("explicit", "explicit-shared-rope", "absorbed",
                                                              "absorbed-two-product", "laga", "laga:kv=strided"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::ValuesIn(kDTypes)));
INSTANTIATE_TEST_SUITE_P(Parts, Bits,
                         ::testing::Combine(::testing::Values("ring", "latent-gather:rows=64", "latent-ring:rows=64",
                                                              "laga:1,latent-ring:2"),
                                            ::testing::Values(AttentionCore::fused), ::testing::ValuesIn(kDTypes)));

TEST(OneRank, ExplicitAndLagaGiveTheSameOutputBits) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (AttentionCore core : {AttentionCore::eager, AttentionCore::fused}) {
      const BlockProblem p = small_problem(small_config(6), 37, dtype, core);
      const BlockData data = seeded_data(p);
      BlockRunOptions options;
      options.repetitions = 1;
      const BlockRun a = run_block(p, data, parse_layout("explicit"), options);
      const BlockRun b = run_block(p, data, parse_layout("laga"), options);
      EXPECT_TRUE(same_bits(a.y, b.y)) << name_of(dtype) << " " << name_of(core);
    }
  }
}

TEST(Unfit, HeadsThatRanksDoNotDivideSayWhatWouldWork) {
  const BlockProblem p = small_problem(small_config(6), 24, DType::f32, AttentionCore::fused);
  const BlockData data = seeded_data(p);
  BlockRunOptions options;
  options.group.num_ranks = 4;
  try {
    run_block(p, data, parse_layout("laga"), options);
    FAIL() << "4 ranks and 6 heads were accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("6 heads"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("1, 2, 3, 6"), std::string::npos) << error.what();
  }
}

TEST(Unfit, RanksBeyondTheHeadsSayWhatRunsThere) {
  const ModelConfig config = small_config(16);
  const std::string reason = why_unfit(parse_layout("laga"), config, 32, 1024);
  for (const std::string remedy : {"16 heads", "laga:16,ring:2", "ring:32", "latent-gather:32", "latent-ring:32"})
    EXPECT_NE(reason.find(remedy), std::string::npos) << reason;
  for (const std::string layout : {"laga:16,ring:2", "ring", "latent-gather:32", "latent-ring", "laga:8,ring,dp:2"})
    EXPECT_EQ(why_unfit(parse_layout(layout), config, 32, 1024), "") << layout;
  EXPECT_NE(why_unfit(parse_layout("laga:4,ring:2"), config, 16, 1024), "");
  EXPECT_NE(why_unfit(parse_layout("ring"), config, 4, 1024, AttentionCore::eager), "");
  EXPECT_NE(why_unfit(parse_layout("ring:8"), config, 8, 7), "");
}

TEST(AllLayouts, HaveTwoDimensionsWhereRanksAllow) {
  const ModelConfig config = small_config(16);
  const auto texts = [&](int ranks) {
    std::vector<std::string> list;
    for (const Layout& layout : all_sequence_layouts(config, ranks)) list.push_back(to_string(layout));
    return std::vector<std::string>(list.begin() + static_cast<std::ptrdiff_t>(sequence_scheme_names().size()),
                                    list.end());
  };
  using List = std::vector<std::string>;
  EXPECT_EQ(texts(2), List{});
  EXPECT_EQ(texts(3), List{});
  EXPECT_EQ(texts(8), (List{"explicit:4,ring:2", "laga:4,ring:2", "laga:4,latent-ring:2"}));
  EXPECT_EQ(texts(32), (List{"explicit:16,ring:2", "laga:16,ring:2", "laga:16,latent-ring:2"}));
  EXPECT_EQ(texts(24), (List{"explicit:8,ring:3", "laga:8,ring:3", "laga:8,latent-ring:3"}));
}

TEST(Unfit, UnknownNamesAndOptionsAreRefused) {
  const ModelConfig config = small_config(4);
  for (const std::string text :
       {"lago", "laga:v=neither", "explicit:v=copy", "laga:2,dp:2,ring:2", "laga:2,laga:2", "explicit:2,latent-ring:2",
        "absorbed:2,ring:2", "ring:2,ring:2", "laga:2,kv=all", "laga:2,kv=strided,ring:2", "latent-gather:kv=copy",
        "latent-ring:rows=0", "latent-ring:rows=many", "explicit:recompute=up-projection",
        "latent-ring:recompute=up-projection", "laga:recompute=everything"}) {
    EXPECT_THROW(make_sequence_scheme(parse_layout(text), config), std::invalid_argument) << text;
  }
}

TEST(VirtualTime, OfARepetitionIsKernelsAndTheLinkOnly) {
  // More ranks than cores, a slow link on the virtual clock: what earlier repetitions took must not be waited for
  // again.
  const BlockProblem p = small_problem(small_config(8), 64, DType::f32, AttentionCore::fused);
  const BlockData data = seeded_data(p);
  BlockRunOptions options;
  options.group.num_ranks = 8;
  options.group.threads_per_rank = num_cores() / 8 + 1;  // more than the machine has
  options.group.link = {.latency_s = 0.5, .bandwidth_bytes_per_s = 1e12};
  options.repetitions = 3;
  const BlockRun run = run_block(p, data, parse_layout("laga"), options);
  ASSERT_TRUE(run.virtual_clock);
  // Six collectives: q, latent, o; dO, d latent, dQ; one round each.
  EXPECT_GE(run.seconds(), 6 * 0.5);
  EXPECT_LT(run.seconds(), 7 * 0.5);
}

TEST(NoRope, ALatentWithoutRopePartRuns) {
  ModelConfig config = small_config(4);
  config.qk_rope_head_dim = 0;
  for (const std::string layout : {"ring", "latent-gather", "latent-ring", "laga:1,latent-ring:2"}) {
    const BlockProblem p = small_problem(config, 19, DType::f32, AttentionCore::fused);
    const CompareReport report = compare_schemes(compare_options(p, 2, layout), seeded_data(p), kQuiet);
    ASSERT_EQ(report.schemes.size(), 1u);
    EXPECT_TRUE(report.good()) << layout;
  }
  for (const std::string layout :
       {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga", "laga:kv=strided"}) {
    for (AttentionCore core : {AttentionCore::eager, AttentionCore::fused}) {
      const BlockProblem p = small_problem(config, 19, DType::f32, core);
      const CompareReport report = compare_schemes(compare_options(p, 2, layout), seeded_data(p), kQuiet);
      ASSERT_EQ(report.schemes.size(), 1u);
      EXPECT_TRUE(report.good()) << layout;
    }
  }
}

}  // namespace
}  // namespace isomer
