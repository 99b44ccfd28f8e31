// The engine's logits, position by position, against the float64 reference and the training forward.
#include <gmock/gmock.h>

#include "engine_fixture.h"
#include "full_tests.h"
#include "train/language_model.h"

namespace isomer {
namespace {

using namespace testing;

constexpr std::int64_t kTokens = 320;

ModelConfig config_of(const std::string& kind) { return kind == "latent" ? latent_config() : grouped_config(); }

const std::vector<double>& expected_logits(const std::string& kind) {
  static std::map<std::string, std::vector<double>> known;
  auto& logits = known[kind];
  if (logits.empty()) logits = reference_logits(config_of(kind), some_ids(kTokens));
  return logits;
}

struct Case {
  std::string kind, layout;
};
std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.kind + "_" + info.param.layout;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

class EngineLogits : public ::testing::TestWithParam<Case> {};

// Some hundred float64 roundings a block, three blocks deep: a wrong key, weight slice or position shows ten orders
// above.
TEST_P(EngineLogits, AreThoseOfTheWholeSequenceInFloat64) {
  const auto& [kind, layout] = GetParam();
  const ModelConfig config = config_of(kind);
  const ModelWeights weights = noisy_weights(config, DType::f64);
  const Ids ids = some_ids(kTokens);
  const std::vector<double>& expected = expected_logits(kind);
  EXPECT_GT(max_magnitude(expected), 3);
  std::vector<EngineRun> runs = {{.layout = layout, .prompt = 37, .prefill_chunk = 10, .steps = {1, 4, 19}},
                                 {.layout = layout, .prompt = kTokens, .prefill_chunk = 77}};
  if (full_tests()) runs.push_back({.layout = layout});  // decode alone; decode_golden_test.cpp has some of them
  for (const EngineRun& run : runs) {
    EXPECT_LT(max_relative_difference(engine_logits(run, config, weights, ids), expected), 1e-11)
        << run.prompt << " of them by prefill";
  }
}

// Design contract 10: no more than three times what one rank's explicit form errs in the same dtype, and 8 ε.
TEST_P(EngineLogits, InNarrowTypesErrNoMoreThanOneRank) {
  const auto& [kind, layout] = GetParam();
  const ModelConfig config = config_of(kind);
  const Ids ids = some_ids(kTokens);
  const std::vector<double>& expected = expected_logits(kind);
  const ModelWeights weights = noisy_weights(config, DType::f32);
  const auto error = [&](const EngineRun& run) {
    return max_difference(engine_logits(run, config, weights, ids), expected);
  };
  const double bound = 3 * error({.prompt = kTokens}) + 8 * epsilon_of(DType::f32) * max_magnitude(expected);
  EXPECT_LT(bound, 1e-2);
  const std::int64_t prompt = full_tests() ? 64 : 256;
  EXPECT_LT(error({.layout = layout, .prompt = prompt, .threads = 2}), bound);
  EXPECT_LT(error({.layout = layout, .prompt = kTokens, .prefill_chunk = 100}), bound);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, EngineLogits,
    ::testing::Values(Case{"latent", "tp:1"}, Case{"latent", "tp:2"}, Case{"latent", "tp:4"},
                      Case{"latent", "tp:4,ep=2"}, Case{"latent", "exact-latent:1"}, Case{"latent", "exact-latent:2"},
                      Case{"latent", "exact-latent:4"}, Case{"latent", "exact-latent:2,rope=split"},
                      Case{"latent", "kvp:1"}, Case{"latent", "kvp:2"}, Case{"latent", "kvp:4"},
                      Case{"latent", "kvp:2,ep=2"}, Case{"latent", "helix:kvp=3,tpa=1"},
                      Case{"latent", "helix:kvp=2,tpa=2,ep=2"}, Case{"latent", "medha:kvp=2,tpa=2"},
                      Case{"latent", "dp-ep:2"}, Case{"latent", "dp-ep:4"}, Case{"latent", "dp-ep:2,tpf=2"},
                      Case{"grouped", "dp-ep:3"}, Case{"latent", "tp:2,pp:2"}, Case{"grouped", "pp:3"},
                      Case{"grouped", "helix:kvp=2,tpa=4"}, Case{"grouped", "medha:kvp=3,tpa=2"},
                      Case{"grouped", "tp:1"}, Case{"grouped", "tp:2"}, Case{"grouped", "tp:4"},
                      Case{"grouped", "kvp:2"}, Case{"grouped", "kvp:4"}),
    name_of_case);

/// −ln p(target) from logits.
double loss_of(const std::vector<double>& logits, std::int64_t row, std::int64_t vocab, std::int32_t target) {
  const double* at = logits.data() + row * vocab;
  const double largest = *std::max_element(at, at + vocab);
  double sum = 0;
  for (std::int64_t i = 0; i < vocab; ++i) sum += std::exp(at[i] - largest);
  return largest + std::log(sum) - at[target];
}

TEST(Engine, GivesTheLossesOfTheTrainingForward) {
  for (const std::string kind : {"latent", "grouped"}) {
    const ModelConfig config = config_of(kind);
    const ModelWeights weights = noisy_weights(config, DType::f32);
    const Ids ids = some_ids(kTokens);
    Sample sample{ids, some_ids(kTokens, 8), Ids(ids.size(), 0), Ids(ids.size(), 0)};
    std::vector<double> trained;
    run_group({}, [&](RankContext& ctx) {
      LanguageModel model(ctx, {.config = config, .layout = parse_layout("explicit:1"), .seq = kTokens});
      trained = model.token_losses(ctx, weights, {&sample, 1});
    });
    for (const char* layout : {"tp:2", "kvp:2"}) {
      const EngineRun run{.layout = layout, .prompt = full_tests() ? 20 : 260};
      const auto logits = engine_logits(run, config, weights, ids);
      ASSERT_EQ(static_cast<std::int64_t>(logits.size()), kTokens * config.vocab_size);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        // Logits of size 10, and float32 roundings some hundred deep.
        EXPECT_NEAR(loss_of(logits, t, config.vocab_size, sample.targets[static_cast<std::size_t>(t)]),
                    trained[static_cast<std::size_t>(t)], 2e-3)
            << kind << " " << layout << " position " << t;
      }
    }
  }
}

// Blocks of the prefix lie alike whatever the chunks are, so only products of other shapes round otherwise: nothing
// that shows in float64, and in float32 some tens of roundings in three layers.
TEST(Engine, PrefillDoesNotDependOnTheChunk) {
  const Ids ids = some_ids(560);  // more than one block of the prefix
  const auto length = static_cast<std::int64_t>(ids.size());
  for (const std::string kind : {"latent", "grouped"}) {
    const ModelConfig config = config_of(kind);
    for (const DType dtype : {DType::f64, DType::f32}) {
      const ModelWeights weights = noisy_weights(config, dtype);
      const std::string layout = dtype == DType::f64 ? "tp:1" : "kvp:2";
      const auto in_chunks = [&](std::int64_t chunk) {
        return engine_logits({.layout = layout, .prompt = length, .prefill_chunk = chunk}, config, weights, ids);
      };
      const auto whole = in_chunks(length);
      ASSERT_FALSE(whole.empty());
      for (const std::int64_t chunk : {9, 100, 512}) {
        EXPECT_LT(max_relative_difference(in_chunks(chunk), whole), dtype == DType::f64 ? 1e-13 : 100 * 0x1p-23)
            << kind << " " << layout << " in chunks of " << chunk;
      }
    }
  }
}

// Contract 10 again: decode in a narrow cache, or all in bfloat16, errs at most three times what one rank's explicit
// form does there, and 8 ε.
TEST(Engine, ANarrowCacheCostsItsRounding) {
  const Ids ids = some_ids(kTokens);
  for (const std::string kind : {"latent", "grouped"}) {
    ModelConfig config = config_of(kind);
    config.moe = {};  // rounding would flip routing
    const auto expected = reference_logits(config, ids);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const ModelWeights weights = noisy_weights(config, dtype);
      const auto error = [&](const std::string& layout, std::int64_t prompt) {
        const EngineRun run{.layout = layout, .prompt = prompt, .cache_dtype = DType::bf16};
        return max_difference(engine_logits(run, config, weights, ids), expected);
      };
      const double bound = 3 * error("tp:1", kTokens) + 8 * epsilon_of(DType::bf16) * max_magnitude(expected);
      for (const char* layout : {"tp:1", "kvp:2"}) {
        const double decoded = error(layout, 280);
        EXPECT_LT(decoded, bound) << kind << " " << layout << " " << name_of(dtype);
        EXPECT_GT(decoded, 1e-4 * max_magnitude(expected)) << kind << ": nothing was rounded";
      }
    }
  }
}

TEST(Engine, SequencesOfABatchAreAsIfAlone) {
  const std::vector<std::int64_t> lengths = {1, 70, 17, 33};
  for (const std::string kind : {"latent", "grouped"}) {
    const ModelConfig config = config_of(kind);
    const ModelWeights weights = noisy_weights(config, DType::f32);
    for (const char* layout : {"tp:2", "kvp:2", "dp-ep:2", "pp:3"}) {
      std::vector<std::vector<double>> alone;
      std::vector<Ids> ids;
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        ids.push_back(some_ids(lengths[i] + 6, 20 + i));
        alone.push_back(engine_logits({.layout = layout, .prompt = lengths[i]}, config, weights, ids[i]));
      }
      with_engine({.layout = layout}, config, weights, 300, [&](RankContext& ctx, Engine& engine) {
        std::vector<int> sequences;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          sequences.push_back(engine.add_sequence());
          engine.prefill(ctx, sequences[i], std::span(ids[i]).first(static_cast<std::size_t>(lengths[i])));
        }
        for (std::size_t step = 0; step < 6; ++step) {
          std::vector<Engine::Input> inputs;
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            inputs.push_back({sequences[i], std::span(ids[i]).subspan(static_cast<std::size_t>(lengths[i]) + step, 1)});
          }
          const auto logits = values_of(engine.decode(ctx, inputs));
          const auto vocab = static_cast<std::size_t>(config.vocab_size);
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            const auto row = static_cast<std::ptrdiff_t>((static_cast<std::size_t>(lengths[i]) + step) * vocab);
            const std::vector<double> expected(alone[i].begin() + row,
                                               alone[i].begin() + row + static_cast<std::ptrdiff_t>(vocab));
            const std::vector<double> got(logits.begin() + static_cast<std::ptrdiff_t>(i * vocab),
                                          logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
            // Products of four rows may take another kernel than those of one.
            EXPECT_LT(max_relative_difference(got, expected), 1e-4) << kind << " " << layout << " " << i;
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace isomer
