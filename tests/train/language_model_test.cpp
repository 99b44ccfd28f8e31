// Whole models under every layout against the float64 reference: loss and every gradient, summed over ranks. Documents
// are packed, lengths odd, and routing is the reference's, so that nothing but rounding is left.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>

#include "comm/communicator.h"
#include "full_tests.h"
#include "layers/reference/language_model.h"
#include "train/train_fixture.h"

namespace isomer {
namespace {

using testing::config_from;
using testing::kGroupedModel;
using testing::kLatentModel;
using testing::max_relative_difference;
using testing::RoutingTape;
using testing::values_of;

struct Problem {
  std::string model = kLatentModel;
  std::string layout = "laga:1";
  DType dtype = DType::f32;
  std::int64_t seq = 23;
  std::int64_t batch = 2;  // over all replicas
  std::int64_t micro_batch = 0;
  bool drop = false;
};

std::vector<Sample> samples_of(const Problem& p) {
  const BatchOrder order(testing::documents(), {.seq_len = p.seq, .seed = 3});
  std::vector<Sample> samples;
  for (std::int64_t i = 0; i < p.batch; ++i) samples.push_back(order.sample(i));
  return samples;
}

std::int64_t targets_in(const std::vector<Sample>& samples) {
  std::int64_t count = 0;
  for (const Sample& s : samples)
    count += std::count_if(s.targets.begin(), s.targets.end(), [](int t) { return t >= 0; });
  return count;
}

/// The weights as the dtype has them.
std::map<std::string, std::vector<double>> weights_of(const Problem& p, const ModelConfig& config) {
  auto weights = widened_model_weights(testing::spread_weights(config));
  for (auto& [name, values] : weights) {
    if (!name.ends_with("e_score_correction_bias")) values = testing::rounded(std::move(values), p.dtype);
  }
  return weights;
}

LanguageModelReferenceResult reference_of(const Problem& p, const ModelConfig& config) {
  const auto weights = weights_of(p, config);
  LanguageModelReferenceInput input{.weights = weights};
  int sequence = 0;
  for (const Sample& sample : samples_of(p)) {
    for (std::size_t i = 0; i < sample.ids.size(); ++i) {
      input.tokens.push_back(sample.ids[i]);
      input.targets.push_back(sample.targets[i]);
      input.segments.push_back(1000 * sequence + sample.segments[i]);
      input.positions.push_back(static_cast<std::int64_t>(i));
    }
    ++sequence;
  }
  return language_model_reference(config, input, 2);
}

RoutingTape tape_of(const Problem& p, const ModelConfig& config, const LanguageModelReferenceResult& reference) {
  RoutingTape tape(p.seq, p.batch);
  for (std::size_t layer = 0; layer < reference.experts.size(); ++layer) {
    if (reference.experts[layer].empty()) continue;
    tape.set(
        0, static_cast<std::int64_t>(layer),
        {.num_tokens = p.seq * p.batch, .top_k = config.moe.num_experts_per_tok, .experts = reference.experts[layer]});
  }
  tape.deal(parse_layout(p.layout));
  return tape;
}

struct Outcome {
  double loss = 0;
  std::map<std::string, std::vector<double>> gradients;
  std::vector<Tensor> flat;  // by rank, after the sum
};

/// `tape` null: the router's own choice, as micro-batches need.
Outcome run_model(const Problem& p, const ModelConfig& config, const RoutingTape* tape) {
  const Layout layout = parse_layout(p.layout);
  const SequenceLayout axes = sequence_layout(layout);
  const std::vector<Sample> samples = samples_of(p);
  const double scale = 1.0 / static_cast<double>(targets_in(samples));
  Outcome outcome;
  outcome.flat.resize(static_cast<std::size_t>(axes.num_ranks()));
  std::vector<double> losses(outcome.flat.size());
  std::mutex mutex;
  run_group(testing::group_of(axes.num_ranks()), [&](RankContext& ctx) {
    ctx.comm().drop_transfers(p.drop);
    Parameters parameters(ctx, config, p.dtype);
    parameters.set(testing::spread_weights(config));
    parameters.refresh(ctx);
    const std::int64_t share = p.batch / axes.data_replicas, micro = p.micro_batch > 0 ? p.micro_batch : share;
    LanguageModel model(ctx, {.config = config, .layout = layout, .dtype = p.dtype, .seq = p.seq, .batch = micro});
    if (tape != nullptr) {
      model.set_routing([&](std::int64_t layer) { return tape->source(0, layer, ctx.rank()); });
    }
    double loss = 0;
    for (std::int64_t at = 0; at < share; at += micro) {
      const auto first = static_cast<std::size_t>(model.groups().data_rank * share + at);
      loss += model
                  .forward_backward(ctx, parameters, std::span(samples).subspan(first, static_cast<std::size_t>(micro)),
                                    scale)
                  .loss_sum;
    }
    model.sync_gradients(ctx, parameters);
    const std::lock_guard lock(mutex);
    losses[static_cast<std::size_t>(ctx.rank())] = loss * scale;
    outcome.flat[static_cast<std::size_t>(ctx.rank())] = parameters.gradient;
    if (ctx.rank() != 0) return;
    for (const Parameter& parameter : parameters.list()) {
      outcome.gradients[parameter.name] = values_of(parameters.view(parameters.gradient, parameter));
    }
  });
  for (const double loss : losses) outcome.loss += loss;
  return outcome;
}

/// Float32: some hundred roundings on the way through three layers and back, sums of a thousand products. Bfloat16: the
/// same number of roundings that don't average out to less than some ε (2⁻⁸) on the largest entry.
double bound_of(DType dtype) { return dtype == DType::f32 ? 512 * 0x1p-23 : 24 * 0x1p-8; }

double largest_error(const Outcome& outcome, const LanguageModelReferenceResult& reference, std::string& where) {
  double largest = 0;
  for (const auto& [name, expected] : reference.gradients) {
    const auto found = outcome.gradients.find(name);
    const double error = found == outcome.gradients.end() ? INFINITY : max_relative_difference(found->second, expected);
    if (error > largest) where = name;
    largest = std::max(largest, error);
  }
  return largest;
}

void expect_reference(const Problem& p) {
  const ModelConfig config = config_from(p.model);
  const LanguageModelReferenceResult reference = reference_of(p, config);
  ASSERT_EQ(reference.num_targets, targets_in(samples_of(p)));
  ASSERT_LT(reference.num_targets, p.seq * p.batch) << "no document ends in this text";
  const RoutingTape tape = tape_of(p, config, reference);
  const Outcome outcome = run_model(p, config, &tape);
  EXPECT_NEAR(outcome.loss, reference.loss, bound_of(p.dtype) * reference.loss);
  EXPECT_EQ(outcome.gradients.size(), reference.gradients.size());
  std::string where;
  EXPECT_LT(largest_error(outcome, reference, where), bound_of(p.dtype)) << where;
  for (const Tensor& flat : outcome.flat) {  // every rank takes the same step
    EXPECT_EQ(std::memcmp(flat.raw(), outcome.flat[0].raw(), static_cast<std::size_t>(flat.nbytes())), 0);
  }
  if (outcome.flat.size() == 1) return;
  Problem broken = p;
  broken.drop = true;
  const double error = largest_error(run_model(broken, config, &tape), reference, where);
  EXPECT_FALSE(error < 0.2) << "without communication";
}

struct Case {
  std::string layout;
  DType dtype;
  std::int64_t seq, batch;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.layout << " " << name_of(c.dtype); }

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return testing::plain_name(
      fmt::format("{}_{}_s{}_b{}", info.param.layout, name_of(info.param.dtype), info.param.seq, info.param.batch));
}

/// Every layout in float32, each third in bfloat16; lengths and batches take turns. All of them where asked for.
std::vector<Case> cases_of(const std::vector<std::string>& layouts) {
  std::vector<Case> cases;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const bool dp = layouts[i].find("dp") != std::string::npos;
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t seq = 23 + 2 * (at % 4), batch = dp ? 2 + 2 * (at % 2) : 1 + at % 3;
    cases.push_back({layouts[i], DType::f32, seq, batch});
    if (i % 3 == 0 || testing::full_tests()) cases.push_back({layouts[i], DType::bf16, seq, batch});
    if (!testing::full_tests()) continue;
    cases.push_back({layouts[i], DType::f32, 32, 2});
    cases.push_back({layouts[i], DType::f32, 9, 2});
  }
  return cases;
}

class LatentLanguageModel : public ::testing::TestWithParam<Case> {};

TEST_P(LatentLanguageModel, LossAndGradientsAreTheReferences) {
  const Case& c = GetParam();
  expect_reference({.layout = c.layout, .dtype = c.dtype, .seq = c.seq, .batch = c.batch});
}

INSTANTIATE_TEST_SUITE_P(Layouts, LatentLanguageModel,
                         ::testing::ValuesIn(cases_of({"laga:1",
                                                       "ring:1",
                                                       "explicit:2",
                                                       "explicit-shared-rope:2",
                                                       "absorbed:2",
                                                       "laga:2",
                                                       "ring:2",
                                                       "latent-gather:2",
                                                       "latent-ring:2",
                                                       "explicit:3",
                                                       "laga:3",
                                                       "ring:3",
                                                       "latent-gather:3",
                                                       "latent-ring:3",
                                                       "explicit-shared-rope:4",
                                                       "absorbed:4",
                                                       "absorbed-two-product:4",
                                                       "laga:4",
                                                       "laga:4,v=view",
                                                       "laga:4,kv=strided",
                                                       "laga:4,kv=rebuild",
                                                       "ring:4",
                                                       "latent-gather:4",
                                                       "latent-gather:4,kv=kept",
                                                       "latent-ring:4",
                                                       "laga:8",
                                                       "ring:8",
                                                       "latent-ring:8",
                                                       "laga:2,ring:2",
                                                       "explicit:2,ring:2",
                                                       "laga:2,latent-ring:2",
                                                       "laga:2,dp:2",
                                                       "latent-gather:2,dp:2",
                                                       "laga:2,ring:2,dp:2",
                                                       "laga:2,recompute=attention",
                                                       "laga:2,recompute=block",
                                                       "laga:1,recompute=block",
                                                       "latent-ring:2,recompute=block",
                                                       "explicit:2,recompute=attention",
                                                       "laga:2,ring:2,recompute=block"})),
                         case_name);

class GroupedLanguageModel : public ::testing::TestWithParam<Case> {};

TEST_P(GroupedLanguageModel, LossAndGradientsAreTheReferences) {
  const Case& c = GetParam();
  expect_reference({.model = kGroupedModel, .layout = c.layout, .dtype = c.dtype, .seq = c.seq, .batch = c.batch});
}

INSTANTIATE_TEST_SUITE_P(Layouts, GroupedLanguageModel,
                         ::testing::ValuesIn(cases_of({"explicit:1", "explicit:2", "ring:2", "explicit:3", "ring:3",
                                                       "explicit:4", "ring:4", "explicit:8", "ring:8",
                                                       "explicit:2,ring:2", "explicit:2,dp:2", "ring:2,dp:2",
                                                       "explicit:2,recompute=block", "ring:2,recompute=attention"})),
                         case_name);

// Two documents of which one is seen by the other would be another loss: what the reference's masks are worth.
TEST(LanguageModel, DocumentsAndTargetsMatter) {
  Problem p{.seq = 29, .batch = 2};
  const ModelConfig config = config_from(p.model);
  const Outcome outcome = run_model(p, config, nullptr);
  const LanguageModelReferenceResult reference = reference_of(p, config);
  EXPECT_NEAR(outcome.loss, reference.loss, bound_of(p.dtype) * reference.loss);
  p.layout = "laga:2";
  std::vector<double> losses;
  for (const std::int64_t batch : {2, 4}) {
    p.batch = batch;
    losses.push_back(run_model(p, config, nullptr).loss);
  }
  EXPECT_GT(std::abs(losses[0] - losses[1]), 1e-3);
}

TEST(LanguageModel, MicroBatchesAddUpToTheBatch) {
  for (const std::string layout : {"laga:1", "laga:2", "ring:2", "laga:2,dp:2"}) {
    for (const std::string& model : {kLatentModel, kGroupedModel}) {
      if (model == kGroupedModel && layout.starts_with("laga")) continue;
      Problem p{.model = model, .layout = layout, .batch = 4};
      const ModelConfig config = config_from(model);
      const Outcome whole = run_model(p, config, nullptr);
      const std::int64_t replicas = data_ranks_of(parse_layout(layout));
      for (const std::int64_t micro : {std::int64_t{1}, 4 / replicas / 2}) {
        p.micro_batch = micro;
        const Outcome parts = run_model(p, config, nullptr);
        EXPECT_NEAR(parts.loss, whole.loss, 64 * 0x1p-23 * whole.loss) << layout << " " << micro;
        for (const auto& [name, expected] : whole.gradients) {
          EXPECT_LT(max_relative_difference(parts.gradients.at(name), expected), 256 * 0x1p-23)
              << layout << " " << micro << " " << name;
        }
      }
    }
  }
}

TEST(LanguageModel, RefusesWhatDoesNotFit) {
  run_group(testing::group_of(1), [](RankContext& ctx) {
    const ModelConfig config = config_from(kLatentModel);
    EXPECT_THROW(LanguageModel(ctx, {.config = config, .layout = parse_layout("laga:5"), .seq = 23}),
                 std::invalid_argument);
    EXPECT_THROW(
        LanguageModel(ctx,
                      {.config = config, .layout = parse_layout("ring:1"), .core = AttentionCore::eager, .seq = 23}),
        std::invalid_argument);
    LanguageModel model(ctx, {.config = config, .layout = parse_layout("laga:1"), .seq = 23, .batch = 2});
    Parameters parameters(ctx, config, DType::f32);
    const std::vector<Sample> one(1);
    EXPECT_ANY_THROW(model.forward_backward(ctx, parameters, one, 1));
  });
}

}  // namespace
}  // namespace isomer
