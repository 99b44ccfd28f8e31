// Token by token against the logits of an independent oracle (tests/golden/make_decode_golden.py), under every exact
// layout: 320 positions, in float64.
#include <gtest/gtest.h>

#include "engine_fixture.h"
#include "full_tests.h"
#include "golden/golden_file.h"

namespace isomer {
namespace {

using namespace testing;

ModelWeights golden_weights(const golden::GoldenFile& file, const ModelConfig& config) {
  return make_model_weights(config, [&](const std::string& name, const Shape& shape) {
    return file.has(name) ? tensor_of(file.values(name), DType::f64, shape) : Tensor();
  });
}

void expect_oracle_logits(const std::string& name, const std::vector<std::string>& layouts) {
  const golden::GoldenFile file = golden::read_golden_file(name);
  const ModelConfig config = golden::make_model_config(file);
  const ModelWeights weights = golden_weights(file, config);
  const auto& tokens = file.values("tokens");
  const Ids ids(tokens.begin(), tokens.end());
  ASSERT_GE(ids.size(), 300u);
  for (const std::string& layout : layouts) {
    for (const std::int64_t prompt : {0, 150}) {
      if (prompt > 0 && !full_tests()) continue;
      const EngineRun run{.layout = layout, .prompt = prompt};
      // Some hundred roundings of float64 in three layers.
      EXPECT_LT(max_relative_difference(engine_logits(run, config, weights, ids), file.values("logits")), 1e-11)
          << name << " " << layout << ", " << run.prompt << " tokens by prefill";
    }
  }
}

TEST(DecodeGolden, LatentAttentionAndExperts) {
  std::vector<std::string> layouts = {"tp:1", "kvp:2", "exact-latent:2"};
  if (full_tests()) {
    layouts.insert(layouts.end(), {"tp:2", "tp:4", "tp:2,ep=2", "tp:4,ep=4", "kvp:4", "kvp:4,ep=4", "exact-latent:4",
                                   "exact-latent:2,rope=split", "exact-latent:4,rope=split"});
  }
  expect_oracle_logits("decode_mla_moe", layouts);
}

TEST(DecodeGolden, GroupedQueries) {
  std::vector<std::string> layouts = {"tp:2"};
  if (full_tests()) layouts.insert(layouts.end(), {"tp:1", "tp:4", "kvp:2", "kvp:4"});
  expect_oracle_logits("decode_gqa_dense", layouts);
}

}  // namespace
}  // namespace isomer
