// What `--dump` writes, read back as somebody who ports a scheme would: shapes, sums over ranks, the NumPy reader.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "layers/reference/mla_block.h"
#include "model/checkpoint.h"
#include "study/dump.h"
#include "study/program.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using testing::set_values;
using testing::values_of;

constexpr int kRanks = 2;
constexpr std::int64_t kSeq = 13, kBatch = 2;  // 7 and 6 tokens

class DumpFiles : public ::testing::Test {
 protected:
  // One run for all tests of this file.
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TempFolder>();
    result_ = testing::run_isomer(fmt::format("compare --model tiny-mla --seq {} --batch {} --ranks {} --dump {}", kSeq,
                                              kBatch, kRanks, directory().string()));
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { ASSERT_EQ(result_.exit_code, 0) << result_.err; }

  static std::filesystem::path directory() { return folder_->path() / "dump"; }
  static Tensor read(const std::string& file, const std::string& name) {
    return Checkpoint::open(directory() / file).read(name, DType::f32);
  }
  static Tensor of_rank(const std::string& layout, int rank, const std::string& name) {
    return read(fmt::format("{}/rank{}.safetensors", layout, rank), name);
  }
  static std::int64_t rows_of(int rank) { return (rank == 0 ? 7 : 6) * kBatch; }

  static MlaReferenceResult reference(const ModelConfig& config) {
    MlaReferenceWeights weights;
    for (const auto& weight : mla_reference_weights(config)) {
      if (!weight.optional || weight.name.ends_with("layernorm.weight")) {
        weights.*weight.member = values_of(read("shared.safetensors", std::string(weight.name)));
      }
    }
    return mla_block_reference(config, weights, kSeq, kBatch, 0, values_of(read("shared.safetensors", "x")),
                               values_of(read("shared.safetensors", "dy")), 2);
  }

  static inline std::unique_ptr<TempFolder> folder_;
  static inline testing::ProgramResult result_;
};

const std::vector<std::string> kLayouts = {"explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product",
                                           "laga"};

std::vector<double> concatenated(std::vector<double> a, const std::vector<double>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_F(DumpFiles, HaveTheShapesThatTheReadmeSays) {
  const ModelConfig c = load_model_config("tiny-mla");
  const std::int64_t h = c.num_attention_heads, v = c.v_head_dim, mine = h / kRanks, all = kSeq * kBatch;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::int64_t T = rows_of(rank);
    for (const std::string& layout : kLayouts) {
      SCOPED_TRACE(layout);
      EXPECT_EQ(of_rank(layout, rank, "q").shape(), (Shape{T, h, c.qk_head_dim()}));
      EXPECT_EQ(of_rank(layout, rank, "latent").shape(), (Shape{T, c.latent_width()}));
      EXPECT_EQ(of_rank(layout, rank, "q by heads").shape(), (Shape{all, mine, c.qk_head_dim()}));
      EXPECT_EQ(of_rank(layout, rank, "core lse").shape(), (Shape{mine, all}));
      EXPECT_EQ(of_rank(layout, rank, "o").shape(), (Shape{T, h, v}));
      EXPECT_EQ(of_rank(layout, rank, "dO by heads").shape(), (Shape{all, mine, v}));
      EXPECT_EQ(of_rank(layout, rank, "dQ").shape(), (Shape{T, h, c.qk_head_dim()}));
      EXPECT_EQ(of_rank(layout, rank, "y").shape(), (Shape{T, c.hidden_size}));
      EXPECT_EQ(of_rank(layout, rank, "dx").shape(), (Shape{T, c.hidden_size}));
    }
    EXPECT_EQ(of_rank("explicit", rank, "k by heads").shape(), (Shape{all, mine, c.qk_head_dim()}));
    EXPECT_EQ(of_rank("explicit", rank, "v by heads").shape(), (Shape{all, mine, v}));
    EXPECT_EQ(of_rank("explicit", rank, "dK").shape(), (Shape{T, h, c.qk_head_dim()}));
    EXPECT_EQ(of_rank("laga", rank, "latent gathered").shape(), (Shape{all, c.latent_width()}));
    EXPECT_EQ(of_rank("laga", rank, "d latent").shape(), (Shape{T, c.latent_width()}));
    EXPECT_EQ(of_rank("laga", rank, "core output").shape(), (Shape{all, mine, v}));
    EXPECT_EQ(of_rank("absorbed", rank, "core output").shape(), (Shape{all, mine, c.kv_lora_rank}));
  }
}

TEST_F(DumpFiles, RowsAndPartialGradientsOfTheRanksMakeTheWhole) {
  const ModelConfig config = load_model_config("tiny-mla");
  const MlaReferenceResult expected = reference(config);
  // float32 sums of up to a few hundred terms against float64, logits with a spread of 3.
  const double bound = 256 * epsilon_of(DType::f32);
  for (const std::string& layout : kLayouts) {
    SCOPED_TRACE(layout);
    const auto rows = [&](const std::string& name) {
      return concatenated(values_of(of_rank(layout, 0, name)), values_of(of_rank(layout, 1, name)));
    };
    EXPECT_LT(testing::max_relative_difference(rows("y"), expected.y), bound);
    EXPECT_LT(testing::max_relative_difference(rows("dx"), expected.dx), bound);
    EXPECT_LT(testing::max_relative_difference(rows("q"), expected.q), bound);
    EXPECT_LT(testing::max_relative_difference(rows("o"), expected.attention), bound);
    for (const auto& [name, gradient] : expected.gradients) {
      const auto first = values_of(of_rank(layout, 0, "partial_grad." + name));
      const auto second = values_of(of_rank(layout, 1, "partial_grad." + name));
      const bool own_heads = name == "self_attn.kv_b_proj.weight" && !layout.starts_with("explicit");
      std::vector<double> whole = own_heads ? concatenated(first, second) : first;
      if (!own_heads) {
        ASSERT_EQ(first.size(), second.size()) << name;
        for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += second[i];
        EXPECT_GT(testing::max_relative_difference(first, gradient), 1e-3) << name << " is no share";
      }
      EXPECT_LT(testing::max_relative_difference(whole, gradient), bound) << name;
    }
  }
}

TEST_F(DumpFiles, ResultsAreTheRanksPutTogether) {
  const MlaReferenceResult expected = reference(load_model_config("tiny-mla"));
  for (const std::string& layout : kLayouts) {
    SCOPED_TRACE(layout);
    const auto result = [&](const std::string& name) { return values_of(read(layout + "/result.safetensors", name)); };
    for (const char* name : {"y", "dx"}) {
      EXPECT_EQ(result(name), concatenated(values_of(of_rank(layout, 0, name)), values_of(of_rank(layout, 1, name))));
    }
    for (const auto& [name, gradient] : expected.gradients) {
      const auto first = values_of(of_rank(layout, 0, "partial_grad." + name));
      const auto second = values_of(of_rank(layout, 1, "partial_grad." + name));
      std::vector<double> whole = concatenated(first, second);  // own heads each
      if (name != "self_attn.kv_b_proj.weight" || layout.starts_with("explicit")) {
        whole = first;
        for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += second[i];
      }
      EXPECT_EQ(result("grad." + name), testing::rounded(whole, DType::f32)) << name;  // one sum, rounded once
    }
  }
  const Checkpoint in_float64 = Checkpoint::open(directory() / "reference/result.safetensors");
  EXPECT_EQ(values_of(in_float64.read("y", DType::f64)), expected.y);
  EXPECT_EQ(values_of(in_float64.read("dx", DType::f64)), expected.dx);
  for (const auto& [name, gradient] : expected.gradients) {
    EXPECT_EQ(values_of(in_float64.read("grad." + name, DType::f64)), gradient) << name;
  }
}

TEST_F(DumpFiles, TheNumpyReaderReadsThem) {
  if (testing::run_shell("/usr/bin/python3 -c 'import numpy'").exit_code != 0) {
    GTEST_SKIP() << "no /usr/bin/python3 with numpy on this machine";
  }
  const auto reader =
      testing::run_shell(fmt::format("/usr/bin/python3 {0}/read.py {0}/laga/rank1.safetensors", directory().string()));
  EXPECT_EQ(reader.exit_code, 0) << reader.err;
  EXPECT_THAT(reader.out, ::testing::HasSubstr("latent gathered (26, 80) float32 max |x| = "));
  EXPECT_THAT(reader.out, ::testing::HasSubstr("partial_grad.self_attn.kv_b_proj.weight (512, 64) float32"));
  const auto shared =
      testing::run_shell(fmt::format("cd {} && /usr/bin/python3 -c \"import numpy as np, read; "
                                     "print(repr(float(read.load('shared.safetensors')['x'][3, 5])))\"",
                                     directory().string()));
  EXPECT_EQ(shared.exit_code, 0) << shared.err;
  const Tensor x = read("shared.safetensors", "x");
  EXPECT_EQ(std::stod(shared.out), static_cast<double>(x.data<float>()[3 * x.size(1) + 5]));
}

TEST(Dump, WritesViewsElementByElement) {
  const TempFolder folder;
  const auto directory = folder.path() / "dump";
  BlockProblem problem{.config = load_model_config("tiny-mla"), .seq = 2};
  const Shape rows{2, problem.config.hidden_size};
  BlockData data{.weights = seeded_attention_weights(problem.config, 1, DType::f32),
                 .x = seeded_tensor(1, "x", rows, DType::f32),
                 .dy = seeded_tensor(1, "dy", rows, DType::f32)};
  Dump dump(directory, problem, data, 1, true);
  const Tensor whole = testing::tensor_of({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, DType::f32, {3, 4});
  const auto sink = dump.sink();
  sink(0, "laga/view", whole.slice(1, 0, 1));
  sink(0, "laga/view", whole.slice(1, 1, 2).transpose(0, 1));  // a later repetition replaces it
  set_values(whole, std::vector<double>(12, -1.0));            // what was shown was copied
  dump.finish();
  const Tensor view = Checkpoint::open(directory / "laga/rank0.safetensors").read("view", DType::f32);
  EXPECT_EQ(view.shape(), (Shape{2, 3}));
  EXPECT_EQ(values_of(view), (std::vector<double>{1, 5, 9, 2, 6, 10}));
}

TEST_F(DumpFiles, ComeWithAReadme) {
  const std::string readme = testing::text_of(directory() / "README.md");
  EXPECT_THAT(readme, ::testing::HasSubstr("tiny-mla"));
  EXPECT_THAT(readme, ::testing::HasSubstr("13 tokens × 2 sequences, f32, 2 ranks"));
}

}  // namespace
}  // namespace isomer
