// The public elementwise operations on strided views of one to three axes: against double twins written out here, with
// NaN between the rows, and the same bits on any number of threads. What one row does is row_kernels_test.cpp's.
#include "kernels/elementwise.h"

#include <gtest/gtest.h>

#include "kernels/reference/plain_ops.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using testing::noise_values;
using testing::rounded;
using testing::set_values;
using testing::values_of;
using Values = std::vector<double>;

class Elementwise : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  DType statistics() const { return statistic_dtype(GetParam()); }

  /// A view with NaN beside every row; all of them are looked at again by expect_untouched.
  Tensor padded(DType type, Shape shape) {
    Shape whole_shape = shape;
    whole_shape.back() += 3;
    const Tensor whole = Tensor::unrecorded("padded", type, whole_shape);
    set_values(whole, Values(static_cast<std::size_t>(whole.numel()), std::nan("")));
    const int inner = whole.dim() - 1;
    paddings_.push_back(whole.slice(inner, shape.back(), 3));
    return whole.slice(inner, 0, shape.back());
  }
  Tensor filled(DType type, Shape shape, std::uint64_t seed, double scale = 1) {
    const Tensor tensor = padded(type, std::move(shape));
    set_values(tensor, noise_values(seed, tensor.numel(), scale));
    return tensor;
  }
  void expect_untouched() const {
    for (const Tensor& padding : paddings_) {
      for (const double value : values_of(padding)) ASSERT_TRUE(std::isnan(value)) << "written between rows";
    }
  }
  /// body(ctx) on 1, 2 and 3 threads: the same values, which are returned.
  template <class Body>
  Values on_any_threads(Body&& body) {
    RankContext one({});
    const Values values = values_of(body(one));
    for (const int threads : {2, 3}) {
      RankContext many({.num_threads = threads});
      EXPECT_EQ(values_of(body(many)), values) << threads << " threads";
    }
    expect_untouched();
    return values;
  }
  /// Some sums in the statistics' type, and one rounding: relative to the largest value.
  void expect_close(const Values& actual, const Values& expected, DType stored, double sums) const {
    const double bound = sums * epsilon_of(statistics()) + epsilon_of(stored);
    EXPECT_LE(testing::max_relative_difference(actual, expected), bound);
  }

 private:
  std::vector<Tensor> paddings_;
};

constexpr std::int64_t kRows[] = {0, 1, 65, 130};  // tasks have 64 rows

TEST_P(Elementwise, RmsNormBothWays) {
  constexpr std::int64_t kWidth = 520;  // two blocks of columns
  for (const std::int64_t rows : kRows) {
    const Tensor x = filled(dtype(), {rows, kWidth}, 1, 2), weight = filled(dtype(), {kWidth}, 2);
    const Tensor rstd = Tensor::unrecorded("rstd", statistics(), {rows});
    const Values y = on_any_threads([&](RankContext& ctx) {
      const Tensor out = padded(dtype(), {rows, kWidth});
      rms_norm_forward(ctx, "norm", x, weight, 1e-5, out, rstd);
      return out;
    });
    const Values wide_x = values_of(x), wide_weight = values_of(weight);
    Values expected(y.size()), dx(y.size()), dweight(kWidth, 0.0);
    reference::rms_norm(wide_x.data(), wide_weight.data(), 1e-5, rows, kWidth, expected.data());
    expect_close(y, expected, dtype(), 32);
    for (const DType dy_type : {dtype(), statistics()}) {
      const Tensor dy = filled(dy_type, {rows, kWidth}, 3), residual = filled(dtype(), {rows, kWidth}, 4);
      const Values wide_dy = values_of(dy), wide_residual = values_of(residual);
      std::fill(dweight.begin(), dweight.end(), 0.0);
      reference::rms_norm_backward({.dy = wide_dy.data(),
                                    .x = wide_x.data(),
                                    .weight = wide_weight.data(),
                                    .eps = 1e-5,
                                    .num_rows = rows,
                                    .width = kWidth,
                                    .dx = dx.data(),
                                    .dweight = dweight.data()});
      for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += wide_residual[i];
      Tensor gradient;
      const Values actual = on_any_threads([&](RankContext& ctx) {
        const Tensor out = padded(dtype(), {rows, kWidth});
        gradient = padded(statistics(), {kWidth});
        rms_norm_backward(
            ctx, "norm backward",
            {.x = x, .rstd = rstd, .weight = weight, .dy = dy, .residual = residual, .dx = out, .dweight = gradient});
        return out;
      });
      expect_close(actual, dx, dtype(), 64);
      expect_close(values_of(gradient), dweight, statistics(), 64);
      if (dy_type != dtype()) continue;
      RankContext ctx({});  // in place of dy; the weight's gradient still sees dy
      rms_norm_backward(
          ctx, "in place",
          {.x = x, .rstd = rstd, .weight = weight, .dy = dy, .residual = residual, .dx = dy, .dweight = gradient});
      EXPECT_EQ(values_of(dy), actual);
      expect_close(values_of(gradient), dweight, statistics(), 64);
    }
  }
}

TEST_P(Elementwise, RopeTurnsEveryHeadByItsRowsPosition) {
  constexpr std::int64_t kPositions = 40, kBatch = 2, kHeads = 3, kWidth = 6, kOffset = 5;
  RopeRows rope{.cos = Tensor::unrecorded("cos", statistics(), {kPositions, kWidth / 2}),
                .sin = Tensor::unrecorded("sin", statistics(), {kPositions, kWidth / 2}),
                .rows_per_position = kBatch};
  Values cos, sin;
  for (std::int64_t i = 0; i < rope.cos.numel(); ++i) {
    cos.push_back(std::cos(0.37 * static_cast<double>(i)));
    sin.push_back(std::sin(0.37 * static_cast<double>(i)));
  }
  set_values(rope.cos, cos);
  set_values(rope.sin, sin);
  for (const bool interleave : {true, false}) {
    rope.interleave = interleave;
    for (const RopeDirection direction : {RopeDirection::forward, RopeDirection::inverse}) {
      Values before;
      const Values actual = on_any_threads([&](RankContext& ctx) {
        const Tensor q = filled(dtype(), {kPositions * kBatch, kHeads, kOffset + kWidth}, 7);
        before = values_of(q);
        apply_rope(ctx, "rope", q.slice(2, kOffset, kWidth), rope, direction);
        return q;
      });
      Values expected = before;
      const auto pairs = interleave ? reference::RopePairs::interleaved : reference::RopePairs::halves;
      for (std::int64_t row = 0; row < kPositions * kBatch; ++row) {
        const std::int64_t table = row / kBatch * (kWidth / 2);
        for (std::int64_t head = 0; head < kHeads; ++head) {
          double* part = expected.data() + (row * kHeads + head) * (kOffset + kWidth) + kOffset;
          const auto turn =
              direction == RopeDirection::forward ? reference::rope_rotate : reference::rope_rotate_backward;
          turn(part, cos.data() + table, sin.data() + table, kWidth, pairs);
        }
      }
      expect_close(actual, expected, dtype(), 4);
    }
  }
  RankContext ctx({});
  EXPECT_NO_THROW(apply_rope(ctx, "none", padded(dtype(), {4, 2, 0}), {}, RopeDirection::forward));
  EXPECT_THROW(apply_rope(ctx, "odd", padded(dtype(), {4, 2, 3}), rope, RopeDirection::forward), CheckFailure);
  const Tensor too_many = padded(dtype(), {kPositions * kBatch + 1, 1, kWidth});
  EXPECT_THROW(apply_rope(ctx, "short table", too_many, rope, RopeDirection::forward), CheckFailure);
}

TEST_P(Elementwise, CopiesAnyViewAndRoundsOnce) {
  const Shape shapes[] = {{7}, {0, 4}, {130, 5}, {9, 20, 3}, {70, 1, 1}};
  std::vector<std::pair<DType, DType>> types = {{dtype(), dtype()}};
  if (dtype() == DType::bf16) types.insert(types.end(), {{DType::bf16, DType::f32}, {DType::f32, DType::bf16}});
  for (const auto& [from, to] : types) {
    for (const Shape& shape : shapes) {
      const Tensor source = filled(from, shape, 1);
      const Values actual = on_any_threads([&](RankContext& ctx) {
        const Tensor out = padded(to, shape);
        copy(ctx, "copy", source, out);
        return out;
      });
      EXPECT_EQ(actual, rounded(values_of(source), to));
    }
  }
  RankContext ctx({});
  const Tensor k_pe = filled(dtype(), {5, 4}, 2), by_head = padded(dtype(), {5, 3, 4});
  copy(ctx, "one key on every head", k_pe.broadcast(1, 3), by_head);
  for (std::int64_t head = 0; head < 3; ++head) EXPECT_EQ(values_of(by_head.select(1, head)), values_of(k_pe));
  EXPECT_THROW(copy(ctx, "shapes", k_pe, by_head), CheckFailure);
  EXPECT_THROW(copy(ctx, "inner stride", by_head.transpose(1, 2), padded(dtype(), {5, 4, 3})), CheckFailure);
  expect_untouched();
}

TEST_P(Elementwise, SumsOfTwo) {
  for (const Shape& shape : {Shape{7}, Shape{0, 4}, Shape{130, 5}, Shape{9, 20, 3}}) {
    for (const DType a_type : {dtype(), statistics()}) {
      const Tensor a = filled(a_type, shape, 1), b = filled(dtype(), shape, 2);
      Values sum = values_of(a), scaled = values_of(a), alone = values_of(a);
      const Values wide_b = values_of(b);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] += wide_b[i];
        scaled[i] = 0.75 * sum[i];
        alone[i] *= 0.75;
      }
      expect_close(on_any_threads([&](RankContext& ctx) {
                     const Tensor out = padded(a_type, shape);
                     add(ctx, "add", a, b, out);
                     return out;
                   }),
                   sum, a_type, 2);
      if (a_type != dtype()) continue;
      for (const Tensor& second : {b, Tensor()}) {
        expect_close(on_any_threads([&](RankContext& ctx) {
                       const Tensor out = padded(dtype(), shape);
                       scaled_sum(ctx, "scaled sum", a, second, 0.75, out);
                       return out;
                     }),
                     second ? scaled : alone, dtype(), 4);
      }
      RankContext ctx({});
      const Values before = values_of(a);
      add(ctx, "in place", a, b, a);
      expect_close(values_of(a), sum, dtype(), 2);
    }
  }
}

TEST_P(Elementwise, SumsOverHeadsAndRowsAndBiases) {
  for (const std::int64_t rows : kRows) {
    const std::int64_t heads = 5, width = 530;
    const Tensor x = filled(dtype(), {rows, heads, width}, 1), flat = x.select(1, 2);
    const Values wide = values_of(x), wide_flat = values_of(flat);
    Values over_heads(static_cast<std::size_t>(rows * width)), over_rows(static_cast<std::size_t>(width));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < width; ++i) {
        for (std::int64_t head = 0; head < heads; ++head) {
          over_heads[static_cast<std::size_t>(row * width + i)] +=
              wide[static_cast<std::size_t>((row * heads + head) * width + i)];
        }
        over_rows[static_cast<std::size_t>(i)] += wide_flat[static_cast<std::size_t>(row * width + i)];
      }
    }
    expect_close(on_any_threads([&](RankContext& ctx) {
                   const Tensor out = padded(statistics(), {rows, width});
                   sum_heads(ctx, "sum heads", x, out);
                   return out;
                 }),
                 over_heads, statistics(), 8);
    expect_close(on_any_threads([&](RankContext& ctx) {
                   const Tensor out = padded(statistics(), {width});
                   sum_rows(ctx, "sum rows", flat, out);
                   return out;
                 }),
                 over_rows, statistics(), static_cast<double>(rows) + 1);
    const Tensor bias = filled(dtype(), {width}, 9);
    Values biased = wide_flat;
    const Values wide_bias = values_of(bias);
    for (std::size_t i = 0; i < biased.size(); ++i) biased[i] += wide_bias[i % static_cast<std::size_t>(width)];
    expect_close(on_any_threads([&](RankContext& ctx) {
                   const Tensor out = padded(dtype(), {rows, width});
                   copy(ctx, "copy", flat, out);
                   add_bias(ctx, "bias", bias, out);
                   return out;
                 }),
                 biased, dtype(), 2);
  }
}

TEST_P(Elementwise, CausalSoftmaxBothWays) {
  constexpr std::int64_t kHeads = 3, kQueries = 70, kKeys = 90;
  constexpr double kScale = 0.5;
  for (const std::int64_t diagonal : {-100, -30, -1, 0, 7, 20, 200}) {
    for (const bool causal : {true, false}) {
      const Tensor scores = filled(dtype(), {kHeads, kQueries, kKeys}, 1, 8),
                   dp = filled(dtype(), {kHeads, kQueries, kKeys}, 2);
      Values expected = values_of(scores);
      for (std::int64_t row = 0; row < kHeads * kQueries; ++row) {
        double* logits = expected.data() + row * kKeys;
        for (std::int64_t key = 0; key < kKeys; ++key) {
          const bool seen = !causal || key <= row % kQueries + diagonal;
          logits[key] = seen ? kScale * logits[key] : -std::numeric_limits<double>::infinity();
        }
        reference::softmax(logits, kKeys);
      }
      const Values actual = on_any_threads([&](RankContext& ctx) {
        const Tensor out = padded(dtype(), scores.shape());
        softmax_forward(ctx, "softmax", scores, kScale, causal, diagonal, out);
        return out;
      });
      expect_close(actual, expected, dtype(), 96);  // logits up to 14, a sum of 90
      RankContext ctx({});
      softmax_forward(ctx, "in place", scores, kScale, causal, diagonal, scores);
      EXPECT_EQ(values_of(scores), actual);
      Values gradient = actual;
      const Values wide_dp = values_of(dp);
      for (std::int64_t row = 0; row < kHeads * kQueries; ++row) {
        double dot = 0;
        for (std::int64_t i = row * kKeys; i < (row + 1) * kKeys; ++i) {
          dot += actual[static_cast<std::size_t>(i)] * wide_dp[static_cast<std::size_t>(i)];
        }
        for (std::int64_t i = row * kKeys; i < (row + 1) * kKeys; ++i) {
          gradient[static_cast<std::size_t>(i)] *= kScale * (wide_dp[static_cast<std::size_t>(i)] - dot);
        }
      }
      expect_close(on_any_threads([&](RankContext& many) {
                     const Tensor out = padded(dtype(), scores.shape());
                     softmax_backward(many, "softmax backward", scores, dp, kScale, out);
                     return out;
                   }),
                   gradient, dtype(), 128);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Elementwise, ::testing::Values(DType::f32, DType::bf16, DType::f64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(ElementwiseErrors, TypesThatDoNotFitAreRefused) {
  RankContext ctx({});
  const auto tensor = [](DType dtype, Shape shape) { return Tensor::unrecorded("t", dtype, std::move(shape)); };
  const Tensor narrow = tensor(DType::bf16, {4, 6}), single = tensor(DType::f32, {4, 6}),
               wide = tensor(DType::f64, {4, 6});
  EXPECT_THROW(copy(ctx, "copy", wide, single), CheckFailure);
  EXPECT_THROW(copy(ctx, "copy", narrow, wide), CheckFailure);
  EXPECT_THROW(add(ctx, "add", narrow, narrow, single), CheckFailure);
  EXPECT_THROW(add(ctx, "add", narrow, single, narrow), CheckFailure);
  EXPECT_THROW(add(ctx, "add", wide, single, wide), CheckFailure);
  EXPECT_THROW(sum_rows(ctx, "sum", narrow, tensor(DType::bf16, {6})), CheckFailure);
  EXPECT_THROW(sum_heads(ctx, "sum", narrow.unflatten(1, {2, 3}), tensor(DType::bf16, {4, 3})), CheckFailure);
  EXPECT_THROW(rms_norm_forward(ctx, "norm", single, {}, 1e-6, single, tensor(DType::bf16, {4})), CheckFailure);
  EXPECT_THROW(rms_norm_forward(ctx, "norm", single, {}, 1e-6, single, tensor(DType::f32, {5})), CheckFailure);
}

}  // namespace
}  // namespace isomer
