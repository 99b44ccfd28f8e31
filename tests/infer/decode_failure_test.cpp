// A rank that dies or stalls in mid-decode ends the run, with an error at every other rank that names it and the call.
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "engine_fixture.h"

namespace isomer {
namespace {

using namespace testing;
using ::testing::ContainsRegex;
using ::testing::StartsWith;

struct FailedDecode {
  std::vector<std::string> errors;  // by rank; empty where it threw nothing
  double seconds = 0;
};

/// Two sequences decode under a layout; rank 1 does `fault` in layer 1 of the third step, its queries projected.
FailedDecode fail_in_decode(const std::string& layout, double timeout_s, const std::function<void()>& fault) {
  const ModelConfig config = latent_config();
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const DecodeLayout parsed = parse_decode_layout(layout, config);
  FailedDecode failed{.errors = std::vector<std::string>(static_cast<std::size_t>(parsed.devices()))};
  const GroupOptions group{.num_ranks = parsed.devices(), .threads_per_rank = 1, .timeout_s = timeout_s};
  const auto body = [&](RankContext& ctx) {
    Engine engine(ctx, {.config = config, .layout = parsed, .cache_tokens = 256}, weights);
    const Ids ids = some_ids(4);
    const int a = engine.add_sequence(), b = engine.add_sequence();
    for (std::size_t step = 0; step < ids.size(); ++step) {
      ctx.set_observer([&](std::string_view name, const Tensor&) {
        if (ctx.rank() == 1 && step == 2 && name == "layer.1.q") fault();
      });
      const Engine::Input inputs[] = {{a, {&ids[step], 1}}, {b, {&ids[step], 1}}};
      engine.decode(ctx, inputs);
    }
  };
  const double begin_s = wall_clock_s();
  EXPECT_THROW(run_group(group,
                         [&](RankContext& ctx) {
                           try {
                             body(ctx);
                           } catch (const std::exception& error) {
                             failed.errors[static_cast<std::size_t>(ctx.rank())] = error.what();
                             throw;
                           }
                         }),
               Error);
  failed.seconds = wall_clock_s() - begin_s;
  return failed;
}

/// What the other ranks wait in, where rank 1 comes no further than its queries.
struct Waiting {
  std::string layout, call;
};
const std::vector<Waiting> kWaiting = {
    {"helix:kvp=2,tpa=1", "all_to_all 'partial o and lse'"},
    {"helix:kvp=2,tpa=1,hopb=off", "all_to_all 'partial o and lse'"},
    {"helix:kvp=2,tpa=1,q=gather", "all_gather 'q'"},
    {"medha:kvp=2,tpa=1", "send_receive 'partial o and lse'"},
    {"dp-ep:2", "all_to_all 'row counts'"},
};

TEST(DecodeFailure, ARankThatDiesIsNamedWithTheCall) {
  for (const auto& [layout, _] : kWaiting) {
    const FailedDecode failed = fail_in_decode(layout, 60, [] { throw std::runtime_error("out of memory"); });
    EXPECT_LT(failed.seconds, 10) << layout;
    EXPECT_EQ(failed.errors[1], "out of memory");
    // Rank 0 may be a call behind.
    EXPECT_THAT(failed.errors[0], ContainsRegex("^rank 0: [a-z_]+ '[^']+' \\(forward\\): rank 1 threw: out of memory$"))
        << layout;
  }
}

TEST(DecodeFailure, ARankThatStallsIsNamedWithTheCall) {
  for (const std::size_t which : {0, 4}) {
    const auto& [layout, call] = kWaiting[which];
    const FailedDecode failed =
        fail_in_decode(layout, 1, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2000)); });
    EXPECT_LT(failed.seconds, 10) << layout;
    EXPECT_EQ(failed.errors[0], fmt::format("rank 0: {} (forward): rank 1 showed no sign of life for 1 s", call))
        << layout;
    EXPECT_THAT(failed.errors[1], StartsWith("rank 1: "));
  }
}

}  // namespace
}  // namespace isomer
