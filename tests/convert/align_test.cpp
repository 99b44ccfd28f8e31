// Layer-wise alignment: its loss is the reference's, training lowers it, and where nothing is sliced there is none.
#include "convert/align.h"

#include <gtest/gtest.h>

#include "convert/convert_fixture.h"
#include "convert/observed_forward.h"
#include "layers/reference/tpla_attention.h"

namespace isomer {
namespace {

using Values = std::vector<double>;

class Align : public ::testing::Test {
 protected:
  /// The model's layers as they are, with γ in kv_b, and scalars of their own.
  std::vector<ShardedLayer> layers(int num_shards) const {
    std::vector<ShardedLayer> result;
    for (const LayerWeights& layer : weights_.layers) {
      Values kv_b = widened(layer.attention.kv_b_proj);
      const Values gamma = widened(layer.attention.kv_a_layernorm);
      for (std::size_t i = 0; i < kv_b.size(); ++i) kv_b[i] *= gamma[i % gamma.size()];
      const auto g = static_cast<std::int64_t>(num_shards);
      TplaLayer scalars{.kappa = testing::noise_values(31, config_.num_attention_heads * g, 0.2, 1),
                        .rms_scale = testing::noise_values(32, g, 0.2, 1.5)};
      if (num_shards == 1) scalars = {.kappa = Values(3, 1), .rms_scale = {1}};
      result.push_back({std::move(scalars), std::move(kv_b), Values(gamma.size(), 1), {}});
    }
    return result;
  }
  std::vector<AlignedLayer> align(const TplaOptions& options, std::int64_t steps, int threads = 1,
                                  std::int64_t windows = 4) const {
    return align_layers(config_, weights_, options, layers(options.num_shards), windows_.calibration,
                        {.steps = steps, .windows = windows, .learning_rate = 0.02}, threads, {});
  }
  /// The loss of a layer on window 3 by the float64 reference.
  double reference_loss(const TplaOptions& options, std::size_t at) const {
    const std::vector<ShardedLayer> all = layers(options.num_shards);
    const ShardedLayer& layer = all[at];
    const TplaLayer one{.kappa = Values(3, 1), .rms_scale = {1}};
    const Values o_proj = widened(weights_.layers[at].attention.o_proj);
    double error = 0, norm = 0;
    const auto samples = std::span(windows_.calibration).first(4);
    observe_forward(config_, weights_, samples, 1, [&](ObservedLayer&& seen) {
      if (seen.sample != 3 || static_cast<std::size_t>(seen.layer) != at) return;
      const auto attention = [&](const TplaOptions& o, const TplaLayer& scalars) {
        return tpla_attention_reference({.config = config_,
                                         .options = o,
                                         .scalars = scalars,
                                         .kv_b = layer.kv_b,
                                         .gamma = layer.gamma,
                                         .q = seen.q,
                                         .c = seen.c,
                                         .k_pe = seen.k_pe})
            .attention;
      };
      const Values whole = attention({.num_shards = 1}, one), sharded = attention(options, layer.scalars);
      const auto width = static_cast<std::size_t>(config_.num_attention_heads * config_.v_head_dim);
      for (std::size_t row = 0; row < whole.size(); row += width) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(config_.hidden_size); ++i) {
          double y = 0, target = 0;
          for (std::size_t j = 0; j < width; ++j) {
            y += o_proj[i * width + j] * sharded[row + j];
            target += o_proj[i * width + j] * whole[row + j];
          }
          error += (y - target) * (y - target);
          norm += target * target;
        }
      }
    });
    return error / norm;
  }

  ModelConfig config_ = testing::small_config({});
  ModelWeights weights_ = testing::small_weights(config_, DType::f32);
  // One document, so that the reference, which knows no segments, sees what alignment does.
  CalibrationWindows windows_ = calibration_windows(TokenDataset::from_tokens({std::vector<std::int32_t>([] {
                                                                                std::vector<std::int32_t> ids;
                                                                                for (std::int32_t i = 0; i < 200; ++i)
                                                                                  ids.push_back((i * i + 7 * i) % 48);
                                                                                return ids;
                                                                              }())},
                                                                              48),
                                                    config_, {.tokens = 120, .window = 20, .held_out_windows = 1});
};

TEST_F(Align, ItsLossIsTheReferences) {
  for (const TplaOptions& options :
       {TplaOptions{.num_shards = 2}, TplaOptions{.num_shards = 3, .shared_columns = 4, .rms = TplaRms::sliced}}) {
    const std::vector<AlignedLayer> aligned = align(options, 0);
    ASSERT_EQ(aligned.size(), 2U);
    for (std::size_t l = 0; l < 2; ++l) {
      const double expected = reference_loss(options, l);
      EXPECT_GT(expected, 1e-3);
      EXPECT_NEAR(aligned[l].before, expected, 1e-4 * expected);  // float32 sums
      EXPECT_EQ(aligned[l].before, aligned[l].after);
    }
  }
}

TEST_F(Align, TrainingLowersTheLossOfItsWindow) {
  // Random weights on random tokens generalise to nothing, so the window that is trained on is the one looked at.
  for (const TplaOptions& options :
       {TplaOptions{.num_shards = 2}, TplaOptions{.num_shards = 2, .shared_columns = 6, .rms = TplaRms::sliced}}) {
    for (const AlignedLayer& layer : align(options, 60, 1, 1)) EXPECT_LT(layer.after, 0.3 * layer.before);
  }
}

TEST_F(Align, WhatIsExactIsLeftAlone) {
  for (const AlignedLayer& layer : align({.num_shards = 1}, 0)) EXPECT_LT(layer.before, 1e-10);
}

TEST_F(Align, ThreadsChangeNoBit) {
  const auto one = align({.num_shards = 2}, 5, 1), three = align({.num_shards = 2}, 5, 3);
  for (std::size_t l = 0; l < 2; ++l) EXPECT_EQ(one[l].kv_b, three[l].kv_b);
  EXPECT_NE(one[0].kv_b, layers(2)[0].kv_b);
}

}  // namespace
}  // namespace isomer
