// Every scheme against one rank in float64: outputs, all gradients, bytes and memory; over ranks, uneven shards, cores
// and types.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

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
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = fmt::format("{}_P{}_{}_{}_{}", c.layout, c.ranks, c.divisible ? "even" : "uneven", name_of(c.core),
                                 name_of(c.dtype));
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return name;
}

/// Heads that every tested number of ranks divides in some size.
std::int64_t heads_for(int ranks) { return ranks == 3 ? 6 : ranks == 7 ? 7 : 8; }

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const std::string layout :
       {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga", "laga:v=view"}) {
    for (int ranks : {1, 2, 3, 4, 7, 8}) {
      for (bool divisible : {true, false}) {
        for (AttentionCore core : {AttentionCore::eager, AttentionCore::fused}) {
          for (DType dtype : {DType::f32, DType::bf16}) cases.push_back({layout, ranks, divisible, core, dtype});
        }
      }
    }
  }
  return cases;
}

class Schemes : public ::testing::TestWithParam<Case> {
 protected:
  BlockProblem problem() const {
    const Case& c = GetParam();
    const std::int64_t seq = c.divisible ? 24 + (c.ranks == 7 ? 4 : 0) : 29;
    // Where a projection or norm is absent alternates with the number of ranks.
    const ModelConfig config = small_config(heads_for(c.ranks), c.ranks % 2 == 0 ? 20 : 0, c.ranks != 4);
    return small_problem(config, seq, c.dtype, c.core);
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
                                                              "absorbed-two-product", "laga"),
                                            ::testing::Values(AttentionCore::eager, AttentionCore::fused),
                                            ::testing::Values(DType::f32, DType::bf16)));

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

TEST(Unfit, UnknownNamesAndOptionsAreRefused) {
  const ModelConfig config = small_config(4);
  for (const std::string text : {"lago", "laga:v=neither", "explicit:v=copy", "laga:2,dp:2,ring:2", "laga:2,laga:2",
                                 "explicit:2,latent-ring:2", "absorbed:2,ring:2"}) {
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
  for (const std::string layout : {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga"}) {
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
