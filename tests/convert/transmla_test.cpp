// Grouped-query into latent attention: exact where it must be, and what each step loses is what is measured.
#include "convert/transmla.h"

#include <gmock/gmock.h>

#include <cmath>

#include "convert/convert_fixture.h"
#include "convert/convert_transmla.h"
#include "convert/layer_inputs.h"
#include "convert/observed_forward.h"

namespace isomer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

nlohmann::json gqa_json(std::int64_t kv_heads, nlohmann::json scaling = nullptr) {
  return {{"model_type", "llama"},
          {"vocab_size", 48},
          {"hidden_size", 24},
          {"intermediate_size", 20},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", kv_heads},
          {"head_dim", 8},
          {"rms_norm_eps", 1e-5},
          {"tie_word_embeddings", true},
          {"rope_theta", 100.0},
          {"max_position_embeddings", 64},
          {"rope_scaling", std::move(scaling)}};
}

fs::path write_gqa_model(const TempFolder& folder, const nlohmann::json& json) {
  const fs::path directory = folder.path() / "model";
  const ModelConfig config = parse_model_config(json, "gqa");
  write_checkpoint(directory, model_tensor_sources(testing::small_weights(config, DType::f32), DType::f32), 1 << 30);
  std::ofstream(directory / "config.json") << json.dump(2);
  return directory;
}

TransMlaConversion conversion_of(const TempFolder& folder, const TransMlaOptions& options, int num_threads = 1) {
  return {.model = folder.path() / "model",
          .out = folder.path() / "out",
          .options = options,
          .calibration = {.tokens = 200, .window = 20, .held_out_windows = 2},
          .num_threads = num_threads};
}

TransMlaResult convert(const TempFolder& folder, const TransMlaOptions& options) {
  return convert_transmla(conversion_of(folder, options), testing::small_text());
}

/// Relative to the largest logit: float32 through two layers, a hundred roundings.
double relative(const LogitDifference& difference) { return difference.largest / difference.largest_logit; }
constexpr double kRounding = 2e-5;

TEST(TransMla, RotationIsExactWhileAllKeepRope) {
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    const TempFolder folder;
    write_gqa_model(folder, gqa_json(kv_heads));
    const TransMlaResult result = convert(folder, {.kv_lora_rank = 8, .qk_rope_head_dim = 8});
    ASSERT_EQ(result.steps.size(), 3U);
    EXPECT_LT(relative(result.steps[0].difference), kRounding) << kv_heads;
  }
}

TEST(TransMla, IsExactForOneKvHead) {
  for (const auto& scaling : {nlohmann::json(nullptr), nlohmann::json{{"type", "linear"}, {"factor", 2.0}},
                              nlohmann::json{{"rope_type", "llama3"},
                                             {"factor", 4.0},
                                             {"low_freq_factor", 1.0},
                                             {"high_freq_factor", 4.0},
                                             {"original_max_position_embeddings", 32}}}) {
    const TempFolder folder;
    write_gqa_model(folder, gqa_json(1, scaling));
    for (const TransMlaReport& step : convert(folder, {.kv_lora_rank = 8, .qk_rope_head_dim = 8}).steps) {
      EXPECT_LT(relative(step.difference), kRounding) << step.step << " " << scaling;
      EXPECT_EQ(step.difference.top1_agreements, step.difference.num_tokens);
    }
  }
}

TEST(TransMla, WholeRankLosesNothingMore) {
  const TempFolder folder;
  write_gqa_model(folder, gqa_json(2));
  const TransMlaResult result = convert(folder, {.kv_lora_rank = 24, .qk_rope_head_dim = 8, .balance = 0.7});
  const LogitDifference &dropped = result.steps[1].difference, &reduced = result.steps[2].difference;
  EXPECT_GT(relative(dropped), 1e-3);  // RoPE is gone from half of the keys
  EXPECT_NEAR(reduced.nats_second, dropped.nats_second, 1e-4 * dropped.nats_second);
  EXPECT_NEAR(reduced.mean_divergence, dropped.mean_divergence, 1e-4);
}

TEST(TransMla, FewerColumnsLoseMore) {
  double last = -1;
  for (const std::int64_t rank : {24, 12, 4}) {
    const TempFolder folder;
    write_gqa_model(folder, gqa_json(2));
    const double divergence =
        convert(folder, {.kv_lora_rank = rank, .qk_rope_head_dim = 8}).steps[2].difference.mean_divergence;
    EXPECT_GT(divergence, last) << rank;
    last = divergence;
  }
}

TEST(TransMla, RotationIsOrthogonalAndPutsRopedPairsFirst) {
  const TempFolder folder;
  const ModelConfig config = parse_model_config(gqa_json(2), "gqa");
  const ModelWeights weights = testing::small_weights(config, DType::f32);
  const CalibrationWindows windows = calibration_windows(testing::small_text(), config, {.tokens = 200, .window = 20});
  const auto moments = collect_input_moments(config, weights, windows.calibration, 1, {});
  for (const TransMlaOptions& options : {TransMlaOptions{.kv_lora_rank = 8, .qk_rope_head_dim = 8},
                                         {.kv_lora_rank = 8, .qk_rope_head_dim = 8, .freqfold = 4},
                                         {.kv_lora_rank = 8, .qk_rope_head_dim = 4, .freqfold = 2},
                                         {.kv_lora_rank = 8, .qk_rope_head_dim = 2, .freqfold = 4}}) {
    const KeyRotation rotation = rotate_keys(config, options, widened(weights.layers[0].attention.k_proj), moments[0]);
    constexpr std::int64_t kWidth = 16;
    for (std::int64_t i = 0; i < kWidth; ++i) {
      for (std::int64_t j = 0; j < kWidth; ++j) {
        double dot = 0;
        for (std::int64_t c = 0; c < kWidth; ++c) {
          dot += rotation.rows[static_cast<std::size_t>(i * kWidth + c)] *
                 rotation.rows[static_cast<std::size_t>(j * kWidth + c)];
        }
        ASSERT_NEAR(dot, i == j ? 1 : 0, 1e-12) << i << " " << j;
      }
    }
    // Pair i of r turns with θ^(−2i/r): the original's frequency i·(head_dim/r).
    for (std::int64_t i = 0; i < options.qk_rope_head_dim / 2; ++i) {
      EXPECT_EQ(rotation.frequency[static_cast<std::size_t>(i)], i * (8 / options.qk_rope_head_dim));
    }
  }
}

TEST(TransMla, TheDirectoryIsTheModelOfTheReport) {
  const TempFolder folder;
  const fs::path model = write_gqa_model(folder, gqa_json(2));
  const TransMlaResult result = convert(folder, {.kv_lora_rank = 12, .qk_rope_head_dim = 4, .freqfold = 2});
  const ModelConfig before = load_model_config(model.string()),
                    after = load_model_config((folder.path() / "out").string());
  EXPECT_EQ(after.attention, AttentionKind::mla);
  EXPECT_EQ(after.kv_lora_rank, 12);
  EXPECT_EQ(after.qk_rope_head_dim, 4);
  EXPECT_FALSE(after.kv_a_layernorm);
  EXPECT_EQ(after.rms_norm_eps, 1e-5);
  const ModelWeights first = load_model_weights(Checkpoint::open(model), before, DType::f32);
  const ModelWeights second = load_model_weights(Checkpoint::open(folder.path() / "out"), after, DType::f32);
  const CalibrationWindows windows =
      calibration_windows(testing::small_text(), before, {.tokens = 200, .window = 20, .held_out_windows = 2});
  const LogitDifference difference = compare_logits({before, first}, {after, second}, windows.held_out, 1, {});
  EXPECT_EQ(difference.nats_second, result.steps.back().difference.nats_second);
}

TEST(TransMla, AlignmentBringsBlocksNearer) {
  const TempFolder folder;
  write_gqa_model(folder, gqa_json(2));
  TransMlaConversion conversion = conversion_of(folder, {.kv_lora_rank = 12, .qk_rope_head_dim = 8});
  conversion.align = {.steps = 40, .learning_rate = 3e-3};
  const TransMlaResult result = convert_transmla(conversion, testing::small_text());
  ASSERT_EQ(result.aligned.size(), 2U);
  for (const AlignedBlock& layer : result.aligned) {
    EXPECT_LT(layer.error_after, 0.8 * layer.error_before);
    EXPECT_EQ(layer.steps, 40);
  }
  ASSERT_EQ(result.steps.size(), 4U);
  // The same bits whatever the number of threads.
  const TempFolder other;
  write_gqa_model(other, gqa_json(2));
  TransMlaConversion again = conversion_of(other, conversion.options, 3);
  again.align = conversion.align;
  EXPECT_EQ(convert_transmla(again, testing::small_text()).steps.back().difference.nats_second,
            result.steps.back().difference.nats_second);
}

TEST(TransMla, RefusesWhatDoesNotFit) {
  const TempFolder folder;
  write_gqa_model(folder, gqa_json(2));
  const auto message = [&](const TransMlaOptions& options) {
    return testing::message_of([&] { convert(folder, options); });
  };
  EXPECT_THAT(message({.kv_lora_rank = 25, .qk_rope_head_dim = 8}), HasSubstr("--kv-lora-rank 25: 1 to 24"));
  EXPECT_THAT(message({.kv_lora_rank = 0, .qk_rope_head_dim = 8}), HasSubstr("--kv-lora-rank 0"));
  EXPECT_THAT(message({.kv_lora_rank = 8, .qk_rope_head_dim = 6}), HasSubstr("--qk-rope-head-dim 6: an even divisor"));
  EXPECT_THAT(message({.kv_lora_rank = 8, .qk_rope_head_dim = 4}), HasSubstr("--freqfold 1: a multiple of"));
  EXPECT_THAT(message({.kv_lora_rank = 8, .qk_rope_head_dim = 8, .freqfold = 3}), HasSubstr("--freqfold 3"));
  EXPECT_THAT(message({.kv_lora_rank = 8, .qk_rope_head_dim = 8, .balance = 0}), HasSubstr("--balance 0"));
  EXPECT_FALSE(fs::exists(folder.path() / "out"));
  const TempFolder yarn;
  write_gqa_model(yarn, gqa_json(2, {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}}));
  EXPECT_THAT(testing::message_of([&] { convert(yarn, {.kv_lora_rank = 8, .qk_rope_head_dim = 8}); }),
              HasSubstr("RoPE scaling"));
  const TempFolder biased;
  nlohmann::json with_bias = gqa_json(2);
  with_bias["attention_bias"] = true;
  write_gqa_model(biased, with_bias);
  EXPECT_THAT(testing::message_of([&] { convert(biased, {.kv_lora_rank = 8, .qk_rope_head_dim = 8}); }),
              HasSubstr("biases"));
  const TempFolder latent;
  testing::write_small_model(latent, {}, DType::f32);
  EXPECT_THAT(testing::message_of([&] { convert(latent, {.kv_lora_rank = 8, .qk_rope_head_dim = 4}); }),
              HasSubstr("latent already"));
}

}  // namespace
}  // namespace isomer
