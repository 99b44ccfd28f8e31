// The reference of whole models against the NumPy golden files, and its gradients against finite differences where they
// have none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "golden/golden_file.h"
#include "layers/reference/language_model.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using golden::GoldenFile;
using testing::max_relative_difference;
using testing::noise_values;

using NamedValues = std::map<std::string, std::vector<double>>;

template <class T>
std::vector<T> integers(const GoldenFile& file, const std::string& name) {
  const auto& values = file.values(name);
  return {values.begin(), values.end()};
}

NamedValues golden_weights(const GoldenFile& file) {
  NamedValues weights;
  for (const auto& [name, tensor] : file.tensors) {
    if (name.starts_with("model.") || name.starts_with("lm_head.")) weights[name] = tensor.values;
  }
  return weights;
}

std::vector<std::vector<std::int32_t>> golden_experts(const GoldenFile& file, const ModelConfig& config) {
  std::vector<std::vector<std::int32_t>> experts;
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const auto name = fmt::format("experts.{}", layer);
    experts.push_back(file.has(name) ? integers<std::int32_t>(file, name) : std::vector<std::int32_t>{});
  }
  return experts;
}

LanguageModelReferenceInput golden_input(const GoldenFile& file, const NamedValues& weights) {
  return {.weights = weights,
          .tokens = integers<std::int32_t>(file, "tokens"),
          .targets = integers<std::int32_t>(file, "targets"),
          .segments = integers<int>(file, "segments"),
          .positions = integers<std::int64_t>(file, "positions")};
}

/// Some hundred ε a block, three blocks deep.
constexpr double kTolerance = 4096 * 0x1p-52;

class LanguageModelGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(LanguageModelGolden, AgreesWithTheNumpyOracle) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const NamedValues weights = golden_weights(file);
  for (const bool routing_given : {false, true}) {
    LanguageModelReferenceInput input = golden_input(file, weights);
    if (routing_given) input.experts = golden_experts(file, config);
    const LanguageModelReferenceResult result = language_model_reference(config, input, 2);
    EXPECT_NEAR(result.loss, file.values("loss")[0], kTolerance * file.values("loss")[0]);
    EXPECT_GT(result.loss, 1);
    EXPECT_LT(max_relative_difference(result.losses, file.values("losses")), kTolerance);
    EXPECT_EQ(result.num_targets, 15);  // 17 tokens, the last of two documents without a target
    EXPECT_EQ(result.experts, golden_experts(file, config));
    for (std::size_t layer = 0; layer < result.layer_outputs.size(); ++layer) {
      const auto name = fmt::format("output.{}", layer);
      EXPECT_LT(max_relative_difference(result.layer_outputs[layer], file.values(name)), kTolerance) << name;
    }
    std::vector<std::string> expected_names, names;
    for (const auto& [name, tensor] : file.tensors) {
      if (name.starts_with("grad.")) expected_names.push_back(name.substr(5));
    }
    for (const auto& [name, gradient] : result.gradients) {
      names.push_back(name);
      EXPECT_LT(max_relative_difference(gradient, file.values("grad." + name)), kTolerance) << name;
    }
    EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected_names));
  }
}

// What the trainer could get wrong must show: documents that see each other, another routing, a tied head's gradient.
TEST_P(LanguageModelGolden, SeesWrongMasksTargetsAndEps) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const NamedValues weights = golden_weights(file);
  const auto loss_of = [&](const LanguageModelReferenceInput& input, const ModelConfig& model) {
    return std::abs(language_model_reference(model, input, 2).loss - file.values("loss")[0]);
  };
  LanguageModelReferenceInput one_document = golden_input(file, weights);
  one_document.segments.assign(one_document.segments.size(), 0);
  for (std::size_t i = 0; i < one_document.positions.size(); ++i) {
    one_document.positions[i] = static_cast<std::int64_t>(i);
  }
  EXPECT_GT(loss_of(one_document, config), 1e-3);
  LanguageModelReferenceInput scored = golden_input(file, weights);
  scored.targets.back() = 0;
  EXPECT_GT(loss_of(scored, config), 1e-3);
  ModelConfig other_eps = config;
  other_eps.rms_norm_eps = 1e-6;
  EXPECT_GT(loss_of(golden_input(file, weights), other_eps), 1e-8);
}

// Rows may come in any order (sequences of a batch interleaved), and only distances between positions matter.
TEST_P(LanguageModelGolden, OrderOfRowsAndFirstPositionsDoNotMatter) {
  const GoldenFile file = golden::read_golden_file(GetParam());
  const ModelConfig config = golden::make_model_config(file);
  const NamedValues weights = golden_weights(file);
  const LanguageModelReferenceInput packed = golden_input(file, weights);
  LanguageModelReferenceInput mixed{.weights = weights};
  const std::size_t size = packed.tokens.size();
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t from = i * 5 % size;
    mixed.tokens.push_back(packed.tokens[from]);
    mixed.targets.push_back(packed.targets[from]);
    mixed.segments.push_back(7 - packed.segments[from]);
    mixed.positions.push_back(packed.positions[from] + 40 * packed.segments[from]);
  }
  const auto expected = language_model_reference(config, packed, 1),
             actual = language_model_reference(config, mixed, 3);
  EXPECT_NEAR(actual.loss, expected.loss, kTolerance * expected.loss);
  for (const auto& [name, gradient] : expected.gradients) {
    EXPECT_LT(max_relative_difference(actual.gradients.at(name), gradient), 4 * kTolerance) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LanguageModelGolden, ::testing::Values("model_mla_moe", "model_gqa_dense"),
                         [](const auto& test) { return std::string(test.param); });

/// What the golden models lack: MiniCPM3's scales, V2's router without and with groups, no shared experts.
ModelConfig scaled_config(RouterKind router) {
  ModelConfig c;
  c.name = "scaled";
  c.attention = AttentionKind::gqa;
  c.vocab_size = 11;
  c.hidden_size = 6;
  c.intermediate_size = 5;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.head_dim = 4;
  c.rope.interleave = false;
  c.scale_emb = 1.7;
  c.scale_depth = 0.9;
  c.dim_model_base = 4;
  c.moe = {.n_routed_experts = 4,
           .num_experts_per_tok = 2,
           .moe_intermediate_size = 3,
           .first_k_dense_replace = 1,
           .n_group = 2,
           .topk_group = 1,
           .norm_topk_prob = router == RouterKind::softmax_greedy,
           .routed_scaling_factor = 1.3,
           .router = router};
  return c;
}

/// True for a weight of an expert of the second layer that no token went to.
bool belongs_to_idle_expert(const std::string& name, const std::vector<std::int32_t>& chosen) {
  const auto at = name.find(".experts.");
  if (at == std::string::npos) return false;
  return std::find(chosen.begin(), chosen.end(), std::stoi(name.substr(at + 9))) == chosen.end();
}

class LanguageModelDerivatives : public ::testing::TestWithParam<RouterKind> {};

TEST_P(LanguageModelDerivatives, GradientsAreTheDerivatives) {
  const ModelConfig config = scaled_config(GetParam());
  NamedValues weights;
  std::uint64_t seed = 1;
  const ModelWeights model = initial_model_weights(config, 1, DType::f32);
  model.for_each([&](const std::string& name, const Tensor& tensor) {
    const bool is_norm = name.ends_with("norm.weight");
    const double deviation = tensor.dim() == 1 ? 0.3 : 1.5 / std::sqrt(static_cast<double>(tensor.size(1)));
    weights[name] = noise_values(++seed, tensor.numel(), deviation, is_norm ? 1 : 0);
  });
  LanguageModelReferenceInput input{.weights = weights,
                                    .tokens = {3, 10, 0, 3, 7, 1, 1},
                                    .targets = {10, 0, -1, 7, 1, 1, -1},
                                    .segments = {0, 0, 0, 1, 1, 1, 1},
                                    .positions = {0, 1, 2, 0, 1, 2, 3}};
  const LanguageModelReferenceResult result = language_model_reference(config, input, 1);
  input.experts = result.experts;  // a step must not change the routing
  for (auto& [name, values] : weights) {
    if (name.ends_with("e_score_correction_bias")) continue;
    const auto size = static_cast<std::int64_t>(values.size());
    const auto direction = noise_values(++seed, size, 1 / std::sqrt(static_cast<double>(size)));
    const std::vector<double> saved = values;
    const auto loss_at = [&](double step) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = saved[i] + step * direction[i];
      return language_model_reference(config, input, 1).loss;
    };
    constexpr double kStep = 1e-3;
    const double quotient =
        (8 * (loss_at(kStep) - loss_at(-kStep)) - (loss_at(2 * kStep) - loss_at(-2 * kStep))) / (12 * kStep);
    values = saved;
    const std::vector<double>& gradient = result.gradients.at(name);
    double expected = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) expected += gradient[i] * direction[i];
    // Truncation step⁴ = 1e-12 times a fifth derivative, cancellation ε / step = 1e-13.
    EXPECT_NEAR(quotient, expected, 1e-9) << name;
    const bool idle = belongs_to_idle_expert(name, result.experts[1]);
    EXPECT_EQ(testing::max_magnitude(gradient) > 1e-6, !idle) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Routers, LanguageModelDerivatives,
                         ::testing::Values(RouterKind::softmax_greedy, RouterKind::softmax_group_limited,
                                           RouterKind::sigmoid_noaux_tc),
                         [](const auto& test) { return fmt::format("router{}", static_cast<int>(test.param)); });

TEST(LanguageModelReference, LossScaleReplacesTheMean) {
  const GoldenFile file = golden::read_golden_file("model_gqa_dense");
  const ModelConfig config = golden::make_model_config(file);
  const NamedValues weights = golden_weights(file);
  LanguageModelReferenceInput input = golden_input(file, weights);
  input.loss_scale = 1.0 / 30;  // of 15 targets
  const auto result = language_model_reference(config, input, 1);
  EXPECT_NEAR(result.loss, file.values("loss")[0], 1e-12);
  auto half = file.values("grad.model.norm.weight");
  for (double& value : half) value /= 2;
  EXPECT_LT(max_relative_difference(result.gradients.at("model.norm.weight"), half), kTolerance);
}

TEST(LanguageModelReference, ComplaintsNameTheCulprit) {
  const GoldenFile file = golden::read_golden_file("model_mla_moe");
  const ModelConfig config = golden::make_model_config(file);
  const auto message_of = [&](auto&& change) -> std::string {
    NamedValues weights = golden_weights(file);
    LanguageModelReferenceInput input = golden_input(file, weights);
    change(weights, input);
    try {
      language_model_reference(config, input, 1);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  using Input = LanguageModelReferenceInput;
  const std::string up = "model.layers.2.mlp.experts.7.up_proj.weight";
  EXPECT_THAT(message_of([&](NamedValues& w, Input&) { w.erase(up); }), ::testing::HasSubstr(up));
  EXPECT_THAT(message_of([&](NamedValues& w, Input&) { w.at(up).pop_back(); }), ::testing::HasSubstr(up));
  const std::string odd = "model.layers.0.mlp.gate.weight";
  EXPECT_THAT(message_of([&](NamedValues& w, Input&) { w[odd] = {1}; }), ::testing::HasSubstr(odd));
  EXPECT_THAT(message_of([](NamedValues&, Input& i) { i.tokens[3] = 24; }), ::testing::HasSubstr("token 24"));
  EXPECT_THAT(message_of([](NamedValues&, Input& i) { i.targets[3] = 24; }), ::testing::HasSubstr("target 24"));
  EXPECT_THAT(message_of([](NamedValues&, Input& i) { i.positions[3] = 90; }), ::testing::HasSubstr("position 4"));
  EXPECT_THAT(message_of([](NamedValues&, Input& i) { i.targets.pop_back(); }), ::testing::HasSubstr("17 tokens"));
  EXPECT_THAT(message_of([&](NamedValues&, Input& i) {
                i.experts = golden_experts(file, config);
                i.experts[1][0] = 8;
              }),
              ::testing::HasSubstr("expert 8"));
}

}  // namespace
}  // namespace isomer
