// What overlap hides: its share out of pairs of steps, and a measurement at a tiny size.
#include "study/overlap_times.h"

#include <gtest/gtest.h>

namespace isomer {
namespace {

TEST(OverlapTimes, TheShareIsThatOfTheMedianPairWithItsInterval) {
  OverlapTimes t{.of = {.batch = 8}, .exchange_s = 10};
  // Steps of 100 s and more in which overlap saves 1 to 25 s; a pair drifts together.
  for (int i = 0; i < 25; ++i) {
    t.off_s.push_back(100 + 7 * (i % 5));
    t.on_s.push_back(t.off_s.back() - (1 + i * 7 % 25));
  }
  const OverlapTimes::Share hidden = t.hidden();
  EXPECT_DOUBLE_EQ(hidden.median, 1.3);  // the 13th of 25
  // (25 − 1.96·√25)/2 = 7.6: the 8th and the 18th.
  EXPECT_DOUBLE_EQ(hidden.low, 0.8);
  EXPECT_DOUBLE_EQ(hidden.high, 1.8);
  EXPECT_DOUBLE_EQ(t.hidden_by_formula(), 0.875);
}

/// On the virtual clock of more ranks than cores a message a sequence is hidden behind the next one's attention.
TEST(OverlapTimes, AStepIsQuickerWithOverlap) {
  ModelConfig config = load_model_config("tiny-mla");
  config.num_hidden_layers = 1;
  const ModelWeights weights = initial_model_weights(config, 1, DType::f32);
  const OverlapTimes t = time_overlap(config, weights, {.kvp = 8, .context = 16384, .batch = 4, .pairs = 9});
  EXPECT_EQ(t.on_s.size(), 9u);
  EXPECT_EQ(t.off_s.size(), 9u);
  EXPECT_GT(t.exchange_s, 0);
  EXPECT_GT(t.attention_s, 0);
  EXPECT_GT(t.hidden().median, 0.2);  // 75 % by the formula; the rest is for a busy machine
}

}  // namespace
}  // namespace isomer
