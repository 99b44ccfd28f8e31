// The rewrite leaves a block's output as it was, whatever the rotation: float64 to rounding.
#include "convert/rewrite.h"

#include <gtest/gtest.h>

#include "convert/convert_fixture.h"
#include "convert/transform.h"
#include "layers/reference/mla_block.h"

namespace isomer {
namespace {

using testing::max_relative_difference;
using testing::noise_values;
using Values = std::vector<double>;

struct RewriteCase {
  std::string transform;
  testing::SmallModel model;
  std::string name;
};

MlaReferenceWeights block_weights(const ModelConfig& config, bool bias) {
  MlaReferenceWeights weights;
  std::uint64_t seed = 1;
  for (const MlaReferenceWeight& weight : mla_reference_weights(config)) {
    if (weight.optional && !(bias && weight.name.ends_with("bias"))) continue;
    const bool is_norm = weight.name.ends_with("norm.weight");
    weights.*weight.member = noise_values(++seed, num_elements(weight.shape), 0.5, is_norm ? 1 : 0);
  }
  return weights;
}

LayerMoments noise_moments(const ModelConfig& config) {
  const auto d = static_cast<std::size_t>(config.kv_lora_rank), n = static_cast<std::size_t>(config.qk_nope_head_dim);
  LayerMoments moments{
      .num_tokens = 64, .second = Values(d * d, 0), .first = Values(d, 0), .query_second = Values(3 * n * n, 0)};
  for (std::uint64_t t = 0; t < 64; ++t) {
    const Values f = noise_values(1000 + t, config.kv_lora_rank),
                 q = noise_values(2000 + t, 3 * config.qk_nope_head_dim);
    for (std::size_t i = 0; i < d * d; ++i) moments.second[i] += f[i / d] * f[i % d];
    for (std::size_t i = 0; i < d; ++i) moments.first[i] += f[i];
    for (std::size_t i = 0; i < 3 * n * n; ++i) {
      moments.query_second[i] += q[i / (n * n) * n + i / n % n] * q[i / (n * n) * n + i % n];
    }
  }
  return moments;
}

MlaReferenceWeights rewritten(const ModelConfig& config, MlaReferenceWeights weights, const Values& u, int threads) {
  LatentWeights latent = rewrite_latent(config,
                                        {.kv_a = weights.kv_a_proj_with_mqa,
                                         .kv_a_bias = weights.kv_a_proj_bias,
                                         .gamma = weights.kv_a_layernorm,
                                         .kv_b = weights.kv_b_proj},
                                        u, threads);
  weights.kv_a_proj_with_mqa = std::move(latent.kv_a);
  weights.kv_a_proj_bias = std::move(latent.kv_a_bias);
  weights.kv_a_layernorm = std::move(latent.gamma);
  weights.kv_b_proj = std::move(latent.kv_b);
  return weights;
}

class Rewrite : public ::testing::TestWithParam<RewriteCase> {};

TEST_P(Rewrite, LeavesTheBlockAsItWas) {
  const ModelConfig config = testing::small_config(GetParam().model);
  const MlaReferenceWeights before = block_weights(config, GetParam().model.bias);
  const LayerMoments moments = noise_moments(config);
  const Values u = tpla_transform(
      parse_tpla_transform(GetParam().transform),
      {.config = config, .moments = moments, .kv_b = before.kv_b_proj, .gamma = before.kv_a_layernorm, .seed = 4});
  const MlaReferenceWeights after = rewritten(config, before, u, 1);
  for (const double gamma : after.kv_a_layernorm) EXPECT_EQ(gamma, 1);
  const Values x = noise_values(77, 11 * config.hidden_size);
  const auto run = [&](const MlaReferenceWeights& weights) {
    return mla_block_reference(config, weights, 11, 1, 3, x, {}, 1).y;
  };
  EXPECT_LE(max_relative_difference(run(after), run(before)), 1e-10);
  EXPECT_EQ(rewritten(config, before, u, 3).kv_b_proj, after.kv_b_proj);  // threads change no bit
  if (GetParam().transform == "none") return;
  EXPECT_GT(max_relative_difference(after.kv_b_proj, before.kv_b_proj), 0.1);  // and it did rotate
}

std::vector<RewriteCase> rewrite_cases() {
  const std::vector<std::pair<std::string, testing::SmallModel>> models = {
      {"plain", {}},
      {"bias", {.bias = true}},
      {"no_norm", {.q_lora = false, .kv_norm = false}},
      {"no_q_lora_bias", {.q_lora = false, .bias = true}},
      {"no_rope", {.rope = 0}}};
  std::vector<RewriteCase> cases;
  for (const std::string transform : {"none", "hadamard", "pca", "pca-centred", "query-aware"}) {
    for (const auto& [name, model] : models) {
      std::string test = transform + "_" + name;
      std::replace(test.begin(), test.end(), '-', '_');
      cases.push_back({transform, model, test});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, Rewrite, ::testing::ValuesIn(rewrite_cases()),
                         [](const auto& i) { return i.param.name; });

// T1: RMSNorm and a rotation commute only once γ has left the norm.
TEST(Rewrite, AGammaThatStaysIsNotTheSame) {
  const ModelConfig config = testing::small_config({});
  const MlaReferenceWeights before = block_weights(config, false);
  const LayerMoments moments = noise_moments(config);
  const Values u =
      tpla_transform(TplaTransform::pca, {.config = config, .moments = moments, .kv_b = before.kv_b_proj, .gamma = {}});
  MlaReferenceWeights wrong = rewritten(config, before, u, 1);
  wrong.kv_a_layernorm = before.kv_a_layernorm;
  const Values x = noise_values(77, 5 * config.hidden_size);
  EXPECT_GT(max_relative_difference(mla_block_reference(config, wrong, 5, 1, 0, x, {}, 1).y,
                                    mla_block_reference(config, before, 5, 1, 0, x, {}, 1).y),
            1e-3);
}

}  // namespace
}  // namespace isomer
