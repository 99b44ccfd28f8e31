#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/reference/blocked_ops.h"
#include "kernels/reference/plain_ops.h"

namespace isomer::reference {
namespace {

using Values = std::vector<double>;

constexpr double kEpsilon = 0x1p-52;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Values random_values(std::mt19937_64& generator, std::int64_t size) {
  std::normal_distribution<double> distribution;
  Values values(static_cast<std::size_t>(size));
  for (double& value : values) value = distribution(generator);
  return values;
}

void expect_near(const Values& actual, const Values& expected, double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], bound) << "element " << i;
}

TEST(PlainOps, RotatedPairSeesOnlyTheDistance) {
  const double frequency = 0.01;
  const auto rotated = [&](Values pair, double position, RopePairs pairs) {
    const double cos = std::cos(position * frequency), sin = std::sin(position * frequency);
    rope_rotate(pair.data(), &cos, &sin, 2, pairs);
    return pair;
  };
  for (const RopePairs pairs : {RopePairs::halves, RopePairs::interleaved}) {
    const Values q = rotated({3, 0}, 70010, pairs), k = rotated({2, 0}, 70000, pairs);
    EXPECT_NEAR(q[0] * k[0] + q[1] * k[1], 6 * std::cos(10 * frequency), 1e-11);  // angles of 700 carry 700 ε
  }
  const Values quarter = rotated({1, 0}, 50 * std::numbers::pi, RopePairs::halves);
  EXPECT_NEAR(quarter[1], 1, kEpsilon);  // counter-clockwise
}

TEST(PlainOps, RopePairsStandSideBySideOrHalfAWidthApart) {
  const Values cos = {0, 1}, sin = {1, 0};  // a quarter turn of the first pair only
  Values interleaved = {1, 2, 3, 4}, halves = {1, 2, 3, 4};
  rope_rotate(interleaved.data(), cos.data(), sin.data(), 4, RopePairs::interleaved);
  rope_rotate(halves.data(), cos.data(), sin.data(), 4, RopePairs::halves);
  EXPECT_EQ(interleaved, (Values{-2, 1, 3, 4}));
  EXPECT_EQ(halves, (Values{-3, 2, 1, 4}));
  rope_rotate_backward(halves.data(), cos.data(), sin.data(), 4, RopePairs::halves);
  EXPECT_EQ(halves, (Values{1, 2, 3, 4}));
}

TEST(PlainOps, SoftmaxOfAMaskedRowIsEmpty) {
  Values row = {-kInfinity, -kInfinity};
  EXPECT_EQ(softmax(row.data(), 2), -kInfinity);
  EXPECT_EQ(row, (Values{0, 0}));
  EXPECT_EQ(softmax(row.data(), 0), -kInfinity);
  row = {1000, -kInfinity, 1000};
  EXPECT_NEAR(softmax(row.data(), 3), 1000 + std::log(2.0), 1000 * kEpsilon);
  EXPECT_EQ(row, (Values{0.5, 0, 0.5}));
}

TEST(PlainOps, RmsNormGradientsAreTheDerivatives) {
  std::mt19937_64 generator(1);
  constexpr std::int64_t kRows = 3, kWidth = 5;
  constexpr double kEps = 0.1, kStep = 1e-3;
  Values x = random_values(generator, kRows * kWidth), weight = random_values(generator, kWidth);
  const Values dy = random_values(generator, kRows * kWidth);
  Values dx(x.size()), dweight(weight.size());
  rms_norm_backward({dy.data(), x.data(), weight.data(), kEps, kRows, kWidth, dx.data(), dweight.data()});
  const auto loss = [&] {
    Values y(x.size());
    rms_norm(x.data(), weight.data(), kEps, kRows, kWidth, y.data());
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  const auto derivative = [&](double& value) {
    const double saved = value;
    double losses[4];
    for (int i = 0; i < 4; ++i) {
      value = saved + kStep * (i < 2 ? i - 2 : i - 1);
      losses[i] = loss();
    }
    value = saved;
    return (8 * (losses[2] - losses[1]) - (losses[3] - losses[0])) / (12 * kStep);
  };
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(dx[i], derivative(x[i]), 1e-10);
  for (std::size_t i = 0; i < weight.size(); ++i) EXPECT_NEAR(dweight[i], derivative(weight[i]), 1e-10);
}

struct Size {
  std::int64_t m, n, k;
};
class GemmTiled : public testing::TestWithParam<Size> {};

TEST_P(GemmTiled, EqualsTheSimpleLoopForEveryTransposition) {
  const auto [m, n, k] = GetParam();
  std::mt19937_64 generator(2);
  const Values a = random_values(generator, m * k), b = random_values(generator, k * n);
  const auto transposed = [](const Values& values, std::int64_t rows, std::int64_t columns) {
    Values result(values.size());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        result[static_cast<std::size_t>(j * rows + i)] = values[static_cast<std::size_t>(i * columns + j)];
      }
    }
    return result;
  };
  const Values at = transposed(a, m, k), bt = transposed(b, k, n);
  Values expected(static_cast<std::size_t>(m * n));
  matmul(a.data(), b.data(), m, n, k, expected.data());
  for (double& value : expected) value = 2 * value + 0.5;
  for (int form = 0; form < 4; ++form) {
    const bool ta = form & 1, tb = form & 2;
    Values c(expected.size(), 1.0);
    gemm_tiled({.m = m,
                .n = n,
                .k = k,
                .a = ta ? at.data() : a.data(),
                .a_stride = ta ? m : k,
                .a_transposed = ta,
                .b = tb ? bt.data() : b.data(),
                .b_stride = tb ? k : n,
                .b_transposed = tb,
                .c = c.data(),
                .c_stride = n,
                .alpha = 2,
                .beta = 0.5},
               2);
    expect_near(c, expected, 64 * kEpsilon * static_cast<double>(k + 1));  // two orders of a sum of k products
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GemmTiled,
                         testing::Values(Size{1, 1, 1}, Size{3, 5, 7}, Size{513, 3, 4}, Size{5, 1025, 2}, Size{2, 3, 0},
                                         Size{0, 3, 2}, Size{2, 0, 2}));

/// One head, its tensors strided and everything between the head's own elements NaN.
struct Head {
  std::int64_t seq, n = 6, r, v = 9, padding = 3;
  double scale = 0.7;
  Values q, k_nope, k_rope, value, dout;

  static Values strided(std::mt19937_64& generator, std::int64_t rows, std::int64_t width, std::int64_t stride) {
    Values values(static_cast<std::size_t>(rows * stride), std::numeric_limits<double>::quiet_NaN());
    std::normal_distribution<double> distribution;
    for (std::int64_t i = 0; i < rows * width; ++i) {
      values[static_cast<std::size_t>(i / width * stride + i % width)] = distribution(generator);
    }
    return values;
  }
  Head(std::int64_t seq_, std::int64_t r_) : seq(seq_), r(r_) {
    std::mt19937_64 generator(static_cast<std::uint64_t>(seq));
    q = strided(generator, seq, n + r, n + r + padding);
    k_nope = strided(generator, seq, n, n + padding);
    k_rope = strided(generator, seq, r, r + padding);
    value = strided(generator, seq, v, v + padding);
    dout = strided(generator, seq, v, v + padding);
  }
  AttentionHead view() const {
    return {.seq = seq,
            .nope_dim = n,
            .rope_dim = r,
            .v_dim = v,
            .scale = scale,
            .q = q.data(),
            .q_stride = n + r + padding,
            .k_nope = k_nope.data(),
            .k_nope_stride = n + padding,
            .k_rope = k_rope.data(),
            .k_rope_stride = r + padding,
            .v = value.data(),
            .v_stride = v + padding};
  }
  double key(std::int64_t t, std::int64_t j) const {
    return j < n ? k_nope[static_cast<std::size_t>(t * (n + padding) + j)]
                 : k_rope[static_cast<std::size_t>(t * (r + padding) + j - n)];
  }
  /// Probabilities [seq, seq] by softmax over whole rows; `lse` [seq].
  Values probabilities(Values& lse) const {
    Values p(static_cast<std::size_t>(seq * seq), -kInfinity);
    for (std::int64_t i = 0; i < seq; ++i) {
      for (std::int64_t t = 0; t <= i; ++t) {
        double dot = 0;
        for (std::int64_t j = 0; j < n + r; ++j)
          dot += q[static_cast<std::size_t>(i * (n + r + padding) + j)] * key(t, j);
        p[static_cast<std::size_t>(i * seq + t)] = scale * dot;
      }
      lse.push_back(softmax(p.data() + i * seq, seq));
    }
    return p;
  }
};

struct HeadShape {
  std::int64_t seq, rope_dim;
};
class BlockedAttention : public testing::TestWithParam<HeadShape> {
 protected:
  // Logits of a few units lose their ε once in exp; sums of up to 300 probabilities and products follow.
  static constexpr double kBound = 4096 * kEpsilon;
};

TEST_P(BlockedAttention, ForwardEqualsTheSoftmaxOfWholeRows) {
  const Head head(GetParam().seq, GetParam().rope_dim);
  const std::int64_t stride = head.v + head.padding;
  Values expected_lse, lse(static_cast<std::size_t>(head.seq));
  const Values p = head.probabilities(expected_lse);
  Values out(static_cast<std::size_t>(head.seq * stride), -1.0), expected = out;
  for (std::int64_t i = 0; i < head.seq; ++i) {
    for (std::int64_t j = 0; j < head.v; ++j) {
      double sum = 0;
      for (std::int64_t t = 0; t <= i; ++t) {
        sum += p[static_cast<std::size_t>(i * head.seq + t)] * head.value[static_cast<std::size_t>(t * stride + j)];
      }
      expected[static_cast<std::size_t>(i * stride + j)] = sum;
    }
  }
  attention_head_forward(head.view(), {.out = out.data(), .out_stride = stride, .lse = lse.data(), .lse_stride = 1});
  expect_near(out, expected, kBound);  // the padding must still hold −1
  expect_near(lse, expected_lse, kBound);
}

TEST_P(BlockedAttention, BackwardEqualsTheFormulaOverWholeRows) {
  const Head head(GetParam().seq, GetParam().rope_dim);
  const std::int64_t stride = head.v + head.padding, width = head.n + head.r, q_stride = width + head.padding;
  const auto at = [](auto& values, std::int64_t index) -> auto& { return values[static_cast<std::size_t>(index)]; };
  Values expected_lse;
  const Values p = head.probabilities(expected_lse);
  Values dq(head.q.size()), dk_nope(head.k_nope.size()), dv(head.value.size());
  Values dk_rope(static_cast<std::size_t>(head.seq * head.r));
  Values expected_dq = dq, expected_dk_nope = dk_nope, expected_dk_rope = dk_rope, expected_dv = dv;
  for (std::int64_t i = 0; i < head.seq; ++i) {
    Values dp(static_cast<std::size_t>(i + 1));
    double delta = 0;
    for (std::int64_t t = 0; t <= i; ++t) {
      for (std::int64_t j = 0; j < head.v; ++j) {
        at(dp, t) += at(head.dout, i * stride + j) * at(head.value, t * stride + j);
        at(expected_dv, t * stride + j) += at(p, i * head.seq + t) * at(head.dout, i * stride + j);
      }
      delta += at(p, i * head.seq + t) * at(dp, t);
    }
    for (std::int64_t t = 0; t <= i; ++t) {
      const double ds = head.scale * at(p, i * head.seq + t) * (at(dp, t) - delta);
      for (std::int64_t j = 0; j < width; ++j) {
        at(expected_dq, i * q_stride + j) += ds * head.key(t, j);
        double& dk = j < head.n ? at(expected_dk_nope, t * (head.n + head.padding) + j)
                                : at(expected_dk_rope, t * head.r + j - head.n);
        dk += ds * at(head.q, i * q_stride + j);
      }
    }
  }
  Values out(head.value.size()), lse(static_cast<std::size_t>(head.seq));
  const AttentionHeadOutput output = {.out = out.data(), .out_stride = stride, .lse = lse.data(), .lse_stride = 1};
  attention_head_forward(head.view(), output);
  attention_head_backward(head.view(), output,
                          {.dout = head.dout.data(),
                           .dq = dq.data(),
                           .dk_nope = dk_nope.data(),
                           .dk_rope = dk_rope.data(),
                           .dv = dv.data()});
  expect_near(dq, expected_dq, kBound);
  expect_near(dk_nope, expected_dk_nope, kBound);
  expect_near(dk_rope, expected_dk_rope, kBound);
  expect_near(dv, expected_dv, kBound);
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockedAttention,
                         testing::Values(HeadShape{1, 4}, HeadShape{127, 4}, HeadShape{128, 0}, HeadShape{129, 2},
                                         HeadShape{300, 4}));

TEST(ParallelTasks, DoesEveryTaskOnceAndRethrows) {
  for (const int num_threads : {1, 2, 5}) {
    std::vector<int> done(37);
    parallel_tasks(37, num_threads, [&](std::int64_t task) { ++done[static_cast<std::size_t>(task)]; });
    EXPECT_EQ(done, std::vector<int>(37, 1));
    EXPECT_THROW(parallel_tasks(9, num_threads,
                                [](std::int64_t task) {
                                  if (task == 3) throw std::runtime_error("3");
                                }),
                 std::runtime_error);
  }
  parallel_tasks(0, 4, [](std::int64_t) { FAIL(); });
}

}  // namespace
}  // namespace isomer::reference
