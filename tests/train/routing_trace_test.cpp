// Traces of routing: what one layout recorded another replays; files that are none are refused.
#include "train/routing_trace.h"

#include <gtest/gtest.h>

#include <fstream>
#include <numeric>

#include "model/temp_folder.h"

namespace isomer {
namespace {

ModelConfig small_moe() {
  ModelConfig config = load_model_config("tiny-mla");
  config.num_hidden_layers = 3;
  return config;
}

/// Layers 1 and 2 of 2 × 3 tokens, entered in two parts, as two ranks would.
RoutingTrace recorded(const ModelConfig& config) {
  RoutingTrace trace(config, 2, 3);
  for (const std::int64_t layer : {1, 2}) {
    const std::vector<std::int64_t> even = {0, 2, 4}, odd = {5, 3, 1};
    const auto expert = [&](std::int64_t token, std::int64_t slot) {
      return static_cast<std::int32_t>((token + slot + layer) % 8);
    };
    for (const auto& tokens : {even, odd}) {
      Routing routing{.num_tokens = 3, .top_k = 2};
      for (const std::int64_t token : tokens) {
        routing.experts.push_back(expert(token, 0));
        routing.experts.push_back(expert(token, 1));
      }
      trace.enter(layer, tokens, routing);
    }
  }
  return trace;
}

TEST(RoutingTrace, ComesBackInAnyOrderOfTokens) {
  const ModelConfig config = small_moe();
  const TempFolder folder;
  recorded(config).save(folder.path() / "trace.json");
  const RoutingTrace trace = RoutingTrace::load(folder.path() / "trace.json", config, 2, 3);
  const std::vector<std::int64_t> tokens = {4, 1};
  const Routing routing = trace.of(2, tokens);
  EXPECT_EQ(routing.num_tokens, 2);
  EXPECT_EQ(routing.experts, (std::vector<std::int32_t>{6, 7, 3, 4}));
}

TEST(RoutingTrace, AGapIsNotSaved) {
  const TempFolder folder;
  const RoutingTrace trace(small_moe(), 2, 3);
  EXPECT_THROW(trace.save(folder.path() / "trace.json"), Error);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "trace.json"));
}

TEST(RoutingTrace, OtherRunsAndOddFilesAreRefused) {
  const ModelConfig config = small_moe();
  const TempFolder folder;
  const auto file = folder.path() / "trace.json";
  recorded(config).save(file);
  EXPECT_THROW(RoutingTrace::load(file, config, 2, 4), Error);
  EXPECT_THROW(RoutingTrace::load(file, config, 3, 3), Error);
  ModelConfig other = config;
  other.moe.n_routed_experts = 16;
  EXPECT_THROW(RoutingTrace::load(file, other, 2, 3), Error);
  for (const char* text : {"", "[]", "{", "{\"sequences\":2,\"seq\":3,\"top_k\":2,\"num_experts\":8}",
                           "{\"sequences\":2,\"seq\":3,\"top_k\":2,\"num_experts\":8,\"layers\":{\"1\":[1]}}",
                           "{\"sequences\":2,\"seq\":3,\"top_k\":2,\"num_experts\":8,\"layers\":{\"1\":"
                           "[0,1,2,3,4,5,6,7,0,1,2,8],\"2\":[0,1,2,3,4,5,6,7,0,1,2,3]}}"}) {
    std::ofstream(file) << text;
    EXPECT_THROW(RoutingTrace::load(file, config, 2, 3), Error) << text;
  }
  ModelConfig dense = config;
  dense.moe.n_routed_experts = 0;
  EXPECT_THROW(RoutingTrace(dense, 2, 3), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
