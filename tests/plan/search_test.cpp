// The search: that it is complete, that its frontier and its choices are what exhaustive comparison says, and its
// speed.
#include "plan/decode_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <numeric>
#include <stdexcept>

#include "plan/decode_enumerate.h"
#include "plan/decode_operations.h"

namespace isomer {
namespace {

DecodeProblem r1_problem(std::int64_t context) {
  return {.config = load_model_config("deepseek-r1"),
          .context = context,
          .precision = {.weights = Precision::nvfp4, .cache = Precision::fp8, .activations = Precision::bf16}};
}

bool any(const DecodeLayout&) { return true; }

std::optional<DecodePoint> quickest(const DecodeSearch& search, const LayoutFilter& filter) {
  return best_point(search, {.filter = filter, .quickest = true});
}
std::optional<DecodePoint> best_throughput(const DecodeSearch& search, std::optional<double> ttl_s) {
  return best_point(search, {.filter = any, .ttl_s = ttl_s});
}

TEST(Overlap, IsTheFormulaOfHopB) {
  // Published example: 8 requests of 2 and 1.2 units, 25.6 serial; 8·2 + 1.2 beside each other.
  EXPECT_DOUBLE_EQ(overlapped_seconds(8, 2, 1.2, 1), 17.2);
  EXPECT_DOUBLE_EQ(overlapped_seconds(8, 1.2, 2, 1), 17.2);
  EXPECT_DOUBLE_EQ(overlapped_seconds(1, 3, 2, 1), 5);
  // Hidden: 8.4 units; each takes 1.5 times as long meanwhile, and twice as long is no better than one after another.
  EXPECT_DOUBLE_EQ(overlapped_seconds(8, 2, 1.2, 1.5), 17.2 + 0.5 * 8.4);
  EXPECT_DOUBLE_EQ(overlapped_seconds(8, 2, 1.2, 2), 25.6);
  EXPECT_DOUBLE_EQ(overlapped_seconds(8, 2, 1.2, 9), 25.6);
}

TEST(Search, AccountsForEveryConfiguration) {
  const DecodeSearch search = search_decode(r1_problem(1 << 20), load_hardware("gb200-nvl72"), {.max_devices = 16});
  const auto omitted = std::accumulate(search.unfit.begin(), search.unfit.end(), std::int64_t{0});
  EXPECT_EQ(search.examined, omitted + static_cast<std::int64_t>(search.points.size()));
  EXPECT_GT(search.points.size(), 100u);
  EXPECT_GT(search.unfit[static_cast<std::size_t>(Unfit::memory)], 0);
  EXPECT_EQ(search.unfit[static_cast<std::size_t>(Unfit::fits)], 0);
  for (const DecodePoint& point : search.points) {
    EXPECT_GT(point.step_s, 0);
    EXPECT_TRUE(search.layout_of(point).shards.is_exact());
  }
}

Operation operation_named(const DecodeProblem& problem, const Hardware& hardware, const std::string& name) {
  const DecodeLayout layout = parse_decode_layout("dp-ep:64,ep=64", problem.config);
  DecodeOperations operations;
  decode_operations(problem, hardware, layout, 256, operations);
  for (const auto* list : {&operations.core, &operations.moe_ffn}) {
    for (const Operation& op : *list) {
      if (op.name == name) return op;
    }
  }
  throw std::runtime_error(name);
}

TEST(Search, ExpertsAreStoredAndMultipliedAsTheWeightsAre) {
  DecodeProblem problem = r1_problem(4096);
  const Hardware hardware = load_hardware("gb200-nvl72");
  double before = INFINITY;
  for (const Precision weights : {Precision::bf16, Precision::fp8, Precision::nvfp4}) {
    problem.precision.weights = weights;
    const Operation experts = operation_named(problem, hardware, "experts");
    EXPECT_EQ(experts.storage, weights);
    EXPECT_EQ(experts.compute, weights);
    EXPECT_LT(seconds_of(hardware, experts), before);
    before = seconds_of(hardware, experts);
  }
}

TEST(Search, TheRouterIsNoNarrowerThanBf16) {
  DecodeProblem problem = r1_problem(4096);
  for (const Precision weights : {Precision::bf16, Precision::fp8, Precision::nvfp4}) {
    problem.precision.weights = weights;
    const Operation router = operation_named(problem, load_hardware("gb200-nvl72"), "router");
    EXPECT_EQ(router.storage, Precision::bf16);
    EXPECT_EQ(router.compute, Precision::bf16);
    EXPECT_EQ(router.n, 256);
  }
}

TEST(Search, AttentionOverANarrowCacheMultipliesAsTheMeasuredKernelsDo) {
  DecodeProblem problem = r1_problem(4096);
  const auto computed_in = [&](const char* hardware, Precision cache, bool roofline = false) {
    problem.precision.cache = cache;
    const Operation core =
        operation_named(problem, with_assumptions(load_hardware(hardware), {.roofline = roofline}), "attention");
    EXPECT_EQ(core.storage, cache);
    return core.compute;
  };
  // Rows on Blackwell exceed what BF16 could do; those on Hopper don't, and unmeasured devices get no benefit of doubt.
  EXPECT_EQ(computed_in("gb200-nvl72", Precision::fp8), Precision::fp8);
  EXPECT_EQ(computed_in("gb200-nvl72", Precision::nvfp4), Precision::fp8) << "none was measured that multiplies in FP4";
  EXPECT_EQ(computed_in("gb200-nvl72", Precision::bf16), Precision::bf16);
  EXPECT_EQ(computed_in("h200", Precision::fp8), Precision::bf16);
  EXPECT_EQ(computed_in("ascend-910b", Precision::fp8), Precision::bf16);
  EXPECT_EQ(computed_in("gb200-nvl72", Precision::nvfp4, true), Precision::nvfp4);
  EXPECT_EQ(computed_in("h200", Precision::fp8, true), Precision::fp8);
}

TEST(Search, AttentionOfManyHeadsOverAnFp8CacheIsBoundByMemory) {
  // 484 FLOPs a byte of cache: below the 625 that FP8's peak allows, above the 312 of BF16's.
  DecodeProblem problem = r1_problem(1 << 17);
  problem.precision.cache = Precision::fp8;
  const Hardware hardware = load_hardware("gb200-nvl72");
  EXPECT_EQ(bound_of(hardware, operation_named(problem, hardware, "attention")), "memory");
}

TEST(Search, InexactLayoutsNeedToBeAskedFor) {
  const DecodeSearchOptions options{.max_devices = 8, .batches = {8}, .include_inexact = true};
  const DecodeSearch search = search_decode(r1_problem(32768), load_hardware("gb200-nvl72"), options);
  const auto inexact = [](const DecodeLayout& layout) { return !layout.shards.is_exact(); };
  EXPECT_TRUE(quickest(search, inexact).has_value());
}

TEST(Search, FrontierIsWhatNothingBeats) {
  const DecodeSearch search = search_decode(r1_problem(131072), load_hardware("gb200-nvl72"), {.max_devices = 8});
  const auto frontier = pareto_frontier(search, any);
  ASSERT_GT(frontier.size(), 3u);
  for (const DecodePoint& f : frontier) {
    for (const DecodePoint& p : search.points) {
      EXPECT_FALSE(p.per_user() > f.per_user() && p.per_device() > f.per_device());
    }
  }
  for (const DecodePoint& p : search.points) {
    EXPECT_TRUE(std::any_of(frontier.begin(), frontier.end(), [&](const DecodePoint& f) {
      return f.per_user() >= p.per_user() && f.per_device() >= p.per_device();
    }));
  }
  EXPECT_EQ(quickest(search, any)->step_s, frontier.front().step_s);
  EXPECT_EQ(best_throughput(search, std::nullopt)->per_device(), frontier.back().per_device());
}

TEST(Search, OfEqualLayoutsFrontierAndChoiceTakeTheSame) {
  // At batch 1 there is nothing to run beside the exchange: with and without HOP-B a step takes the same.
  const DecodeSearch search =
      search_decode(r1_problem(1 << 20), load_hardware("gb200-nvl72"), {.max_devices = 64, .batches = {1}});
  const DecodePoint best = *quickest(search, any), first = pareto_frontier(search, any).front();
  EXPECT_EQ(to_string(search.layout_of(first)), to_string(search.layout_of(best)));
  EXPECT_EQ(to_string(search.layout_of(best)).find("hopb=off"), std::string::npos);
}

TEST(Search, LimitsHold) {
  const DecodeProblem problem = r1_problem(131072);
  const Hardware hardware = load_hardware("gb200-nvl72");
  const DecodeSearch search = search_decode(problem, hardware, {.max_devices = 16});
  const double ttl = 2 * quickest(search, any)->step_s;
  const auto best = best_throughput(search, ttl);
  ASSERT_TRUE(best.has_value());
  EXPECT_LE(best->step_s, ttl);
  const auto next = next_best(problem, hardware, search, *best, {.filter = any, .ttl_s = ttl});
  ASSERT_TRUE(next.has_value());
  EXPECT_LE(next->point.step_s, ttl);
  EXPECT_LE(next->point.per_device(), best->per_device());
  EXPECT_FALSE(next->why.empty());
  EXPECT_FALSE(best_throughput(search, 1e-9).has_value());
}

TEST(Search, StepAddsUpAndIsExplained) {
  const DecodeProblem problem = r1_problem(131072);
  const Hardware hardware = load_hardware("gb200-nvl72");
  for (const char* text : {"tp:8", "kvp:8,ep=8", "helix:kvp=8,tpa=1,tpf=2,ep=4", "dp-ep:8", "tp:4,dp-ep:2", "tp:4,pp:2",
                           "helix:kvp=4,tpa=2,tpf=1,ep=8,experts=gather,hopb=off"}) {
    const DecodeLayout layout = parse_decode_layout(text, problem.config);
    const StepTime time = decode_step_time(problem, hardware, layout, 16);
    double shares = 0, operations = 0;
    for (const StepShare& share : shares_of(time)) shares += share.seconds;
    for (const PricedOperation& op : priced_operations(problem, hardware, layout, 16)) operations += op.seconds;
    EXPECT_NEAR(shares, time.total(), 1e-9 * shares) << text;
    EXPECT_NEAR(operations - time.hidden, time.total(), 1e-9 * operations) << text;
  }
}

TEST(Search, SharedWorkIsTheSameWork) {
  // What the pricer keeps from layout to layout changes nothing: one after another, each is what it is alone.
  for (const char* model : {"deepseek-r1", "llama-3.1-405b"}) {
    const DecodeProblem problem{.config = load_model_config(model), .context = 65536};
    const Hardware hardware = load_hardware("h200");
    StepPricer together(problem, hardware);
    int checked = 0;
    for (const DecodeLayout& layout : enumerate_decode_layouts(problem.config, 8)) {
      if (why_unfit(layout, problem.config) != Unfit::fits) continue;
      for (const std::int64_t batch : {8, 64, 8}) {
        const StepTime alone = decode_step_time(problem, hardware, layout, batch);
        EXPECT_EQ(together(layout, batch).total(), alone.total()) << to_string(layout) << " at " << batch;
        EXPECT_EQ(together(layout, batch).hidden, alone.hidden) << to_string(layout) << " at " << batch;
      }
      ++checked;
    }
    EXPECT_GT(checked, 40) << model;
  }
}

TEST(Search, OverlapNeverCosts) {
  const DecodeProblem problem = r1_problem(1 << 20);
  const Hardware hardware = load_hardware("gb200-nvl72");
  for (const std::int64_t batch : {1, 2, 8, 64}) {
    DecodeLayout layout = parse_decode_layout("helix:kvp=32,tpa=1,tpf=1,ep=32", problem.config);
    const StepTime with = decode_step_time(problem, hardware, layout, batch);
    layout.hop_b = false;
    const StepTime without = decode_step_time(problem, hardware, layout, batch);
    EXPECT_LE(with.total(), without.total()) << batch;
    if (batch == 1) {
      EXPECT_EQ(with.hidden, 0);
    }
  }
}

TEST(Search, LeastMemoryIsNamed) {
  const DecodeProblem problem = r1_problem(1 << 20);
  DecodeSearchOptions options{.max_devices = 1};
  const Hardware hardware = load_hardware("h100");
  EXPECT_TRUE(search_decode(problem, hardware, options).points.empty());
  const auto least = least_memory(problem, hardware, options);
  ASSERT_TRUE(least.has_value());
  EXPECT_EQ(to_string(least->layout), "tp:1");
  EXPECT_GT(least->memory.total(), hardware.memory_capacity_bytes);
}

TEST(Search, FewestDevicesAreThoseOnWhichItBeginsToFit) {
  const DecodeProblem problem = r1_problem(1 << 17);
  const Hardware hardware = load_hardware("h100");
  const auto enough = fewest_devices(problem, hardware, {.max_devices = 2});
  ASSERT_TRUE(enough.has_value());
  const int devices = enough->layout.devices();
  EXPECT_FALSE(search_decode(problem, hardware, {.max_devices = devices}).points.empty());
  EXPECT_TRUE(search_decode(problem, hardware, {.max_devices = devices / 2}).points.empty());
  DecodeProblem tight = problem;
  tight.memory_limit_bytes = 1e6;
  EXPECT_FALSE(fewest_devices(tight, hardware, {.max_devices = 2}).has_value());
}

TEST(Search, RefusesNothingToSearch) {
  EXPECT_THROW(search_decode(r1_problem(0), load_hardware("h100"), {}), std::invalid_argument);
  EXPECT_THROW(search_decode(r1_problem(1), load_hardware("h100"), {.max_devices = 0}), std::invalid_argument);
}

TEST(Search, PricesAHundredThousandConfigurationsQuickly) {
  const std::clock_t begin = std::clock();
  const DecodeSearch search = search_decode(r1_problem(4096), load_hardware("gb200-nvl72"), {});
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;  // of the processor
  EXPECT_GT(search.points.size(), 100000u);
  fmt::print("{} configurations examined, {} priced in {:.2f} s\n", search.examined, search.points.size(),
             search.seconds);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT_LT(seconds, 40);
#else
  EXPECT_LT(seconds, 2);
#endif
}

}  // namespace
}  // namespace isomer
