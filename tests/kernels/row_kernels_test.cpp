// Row kernels of every instruction set that this processor has, in every type, against the plain double twins.
#include <gtest/gtest.h>

#include "kernels/cpu/elementwise.h"
#include "kernels/reference/plain_ops.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using cpu::InstructionSet;
using cpu::row_kernels_of;
using cpu::Statistic;
using testing::noise_values;
using testing::rounded;

constexpr std::int64_t kWidths[] = {1, 2, 7, 8, 15, 16, 17, 31, 40, 64, 257, 1000};

template <class T>
class RowKernelsTest : public ::testing::Test {
 protected:
  static constexpr DType kStatistic = kDTypeOf<Statistic<T>>;
  static constexpr double kEpsilon = epsilon_of(kDTypeOf<T>);  // of what is stored
  static constexpr double kSum = epsilon_of(kStatistic);       // of sums and statistics

  /// Values in `U`, with a guard that no kernel may touch.
  template <class U>
  struct Row {
    std::vector<U> values;
    explicit Row(const std::vector<double>& from) {
      for (const double value : from) values.push_back(static_cast<U>(value));
      values.push_back(guard());
    }
    static U guard() { return static_cast<U>(-12345.0); }
    U* data() { return values.data(); }
    std::vector<double> wide() const {
      EXPECT_EQ(static_cast<double>(values.back()), static_cast<double>(guard())) << "written beyond the row";
      std::vector<double> result(values.begin(), values.end() - 1);
      return result;
    }
  };
  static std::vector<double> values(std::uint64_t seed, std::int64_t width, double scale = 1, double mean = 0) {
    return rounded(noise_values(seed, width, scale, mean), kDTypeOf<T>);
  }
  static std::vector<double> statistics(std::uint64_t seed, std::int64_t width, double scale = 1, double mean = 0) {
    return rounded(noise_values(seed, width, scale, mean), kStatistic);
  }

  /// body(kernels) for every instruction set, named in what fails.
  template <class Body>
  static void for_each_set(Body&& body) {
    for (const InstructionSet set : cpu::available_instruction_sets()) {
      SCOPED_TRACE(cpu::name_of(set));
      body(row_kernels_of<T>(set));
    }
  }
  static void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                          const std::vector<double>& bounds) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(std::isfinite(actual[i]), std::isfinite(expected[i])) << i << " of " << actual.size();
      ASSERT_LE(std::abs(actual[i] - expected[i]), bounds[i])
          << i << " of " << actual.size() << ": " << actual[i] << " for " << expected[i];
    }
  }
  /// slack · ε of sums and one rounding, relative to each expected value.
  static std::vector<double> relative_bounds(const std::vector<double>& expected, double slack) {
    std::vector<double> bounds;
    for (const double value : expected) bounds.push_back(std::abs(value) * (slack * kSum + kEpsilon));
    return bounds;
  }
};

using ElementTypes = ::testing::Types<float, bf16, double>;
class ElementTypeNames {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::string(name_of(kDTypeOf<T>));
  }
};
TYPED_TEST_SUITE(RowKernelsTest, ElementTypes, ElementTypeNames);

TYPED_TEST(RowKernelsTest, RmsNormForward) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    for (const bool weighted : {true, false}) {
      const auto x = this->values(1, width, 3), w = weighted ? this->values(2, width, 0.3, 1) : std::vector<double>();
      const std::vector<double> ones(x.size(), 1.0);
      const double eps = static_cast<S>(1e-3);
      std::vector<double> expected(x.size());
      reference::rms_norm(x.data(), weighted ? w.data() : ones.data(), eps, 1, width, expected.data());
      this->for_each_set([&](const auto& kernels) {
        for (const bool in_place : {false, true}) {
          typename TestFixture::template Row<TypeParam> from(x), to(x), weight(w);
          TypeParam* y = in_place ? from.data() : to.data();
          S rstd = 0;
          kernels.rms_norm_forward(from.data(), weighted ? weight.data() : nullptr, width, static_cast<S>(eps), y,
                                   &rstd);
          // A sum of positive terms: each of its additions costs half an ε at most, and the root halves that.
          const double slack = static_cast<double>(width) / 2 + 4;
          this->expect_near((in_place ? from : to).wide(), expected, this->relative_bounds(expected, slack));
          double squares = 0;
          for (const double value : x) squares += value * value;
          const double exact = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
          EXPECT_NEAR(static_cast<double>(rstd), exact, exact * slack * this->kSum);
        }
      });
    }
  }
}

TYPED_TEST(RowKernelsTest, RmsNormBackward) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    for (const int parts : {0, 1, 2, 3}) {  // bit 0: a weight, bit 1: a residual
      const auto x = this->values(1, width, 2), dy = this->values(3, width), residual = this->values(4, width);
      const auto w = (parts & 1) != 0 ? this->values(2, width, 0.3, 1) : std::vector<double>(x.size(), 1.0);
      std::vector<double> expected(x.size()), dweight(x.size(), 0.0), bounds(x.size());
      reference::rms_norm_backward({.dy = dy.data(),
                                    .x = x.data(),
                                    .weight = w.data(),
                                    .eps = 1e-3,
                                    .num_rows = 1,
                                    .width = width,
                                    .dx = expected.data(),
                                    .dweight = dweight.data()});
      double squares = 0, dot = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        squares += x[i] * x[i];
        dot += std::abs(dy[i] * w[i] * x[i]);
      }
      const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-3);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double terms =
            rstd * (std::abs(dy[i] * w[i]) + std::abs(x[i]) * dot * rstd * rstd / static_cast<double>(width));
        if ((parts & 2) != 0) expected[i] += residual[i];
        bounds[i] = this->kSum * (static_cast<double>(width) + 8) * (terms + std::abs(residual[i])) +
                    this->kEpsilon * std::abs(expected[i]);
      }
      this->for_each_set([&](const auto& kernels) {
        typename TestFixture::template Row<TypeParam> x_row(x), w_row(w), dy_row(dy), r_row(residual), dx(x);
        typename TestFixture::template Row<S> dy_wide(dy);
        const TypeParam* weight = (parts & 1) != 0 ? w_row.data() : nullptr;
        const TypeParam* added = (parts & 2) != 0 ? r_row.data() : nullptr;
        kernels.rms_norm_backward_wide(x_row.data(), static_cast<S>(rstd), weight, dy_wide.data(), added, width,
                                       dx.data());
        this->expect_near(dx.wide(), expected, bounds);
        kernels.rms_norm_backward(x_row.data(), static_cast<S>(rstd), weight, dy_row.data(), added, width,
                                  dy_row.data());
        this->expect_near(dy_row.wide(), expected, bounds);  // in place of dy
      });
    }
  }
}

TYPED_TEST(RowKernelsTest, RmsNormWeightGradient) {
  using S = Statistic<TypeParam>;
  constexpr std::int64_t kRows = 37;
  for (const std::int64_t width : kWidths) {
    const std::int64_t stride = width + 3;
    const auto x = this->values(1, kRows * stride, 2), dy = this->values(3, kRows * stride);
    const auto rstd = this->statistics(5, kRows, 0.2, 1);
    std::vector<double> expected(static_cast<std::size_t>(width)), bounds(expected.size());
    for (std::int64_t i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      for (std::int64_t row = 0; row < kRows; ++row) {
        const auto element = static_cast<std::size_t>(row * stride + i);
        const double term = x[element] * dy[element] * rstd[static_cast<std::size_t>(row)];
        expected[at] += term;
        bounds[at] += std::abs(term) * this->kSum * (kRows + 3);
      }
    }
    this->for_each_set([&](const auto& kernels) {
      typename TestFixture::template Row<TypeParam> x_row(x), dy_row(dy);
      typename TestFixture::template Row<S> dy_wide(dy), scale(rstd), out(std::vector<double>(expected.size(), 7.0));
      kernels.rms_norm_weight_gradient(x_row.data(), stride, scale.data(), dy_row.data(), stride, kRows, width,
                                       out.data());
      this->expect_near(out.wide(), expected, bounds);
      kernels.rms_norm_weight_gradient_wide(x_row.data(), stride, scale.data(), dy_wide.data(), stride, kRows, width,
                                            out.data());
      this->expect_near(out.wide(), expected, bounds);
    });
  }
}

TYPED_TEST(RowKernelsTest, RopeAndItsInverse) {
  using S = Statistic<TypeParam>;
  constexpr double kMagnitude = 1.25;
  for (const std::int64_t pairs : {1, 2, 3, 8, 16, 17, 32, 50}) {
    const auto x = this->values(1, 2 * pairs, 2);
    std::vector<double> cos, sin;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double angle = 70001 * std::pow(1e4, -static_cast<double>(i) / static_cast<double>(pairs));
      cos.push_back(static_cast<S>(kMagnitude * std::cos(angle)));
      sin.push_back(static_cast<S>(kMagnitude * std::sin(angle)));
    }
    for (const bool interleave : {true, false}) {
      const auto layout = interleave ? reference::RopePairs::interleaved : reference::RopePairs::halves;
      auto expected = x, back = x, identity = x;
      reference::rope_rotate(expected.data(), cos.data(), sin.data(), 2 * pairs, layout);
      reference::rope_rotate_backward(back.data(), cos.data(), sin.data(), 2 * pairs, layout);
      for (double& value : identity) value *= kMagnitude * kMagnitude;
      // Two products and a sum of values up to the row's largest; the stored result rounds again, twice for a round
      // trip.
      const double largest = kMagnitude * kMagnitude * testing::max_magnitude(x);
      const std::vector<double> bounds(x.size(), largest * (4 * this->kSum + this->kEpsilon));
      const std::vector<double> round_trip(x.size(), largest * 4 * (2 * this->kSum + this->kEpsilon));
      this->for_each_set([&](const auto& kernels) {
        typename TestFixture::template Row<TypeParam> row(x), other(x);
        typename TestFixture::template Row<S> c(cos), s(sin);
        kernels.rope(row.data(), c.data(), s.data(), pairs, interleave, S(1));
        this->expect_near(row.wide(), expected, bounds);
        kernels.rope(row.data(), c.data(), s.data(), pairs, interleave, S(-1));
        this->expect_near(row.wide(), identity, round_trip);
        kernels.rope(other.data(), c.data(), s.data(), pairs, interleave, S(-1));
        this->expect_near(other.wide(), back, bounds);
      });
    }
  }
}

TYPED_TEST(RowKernelsTest, SoftmaxOfEveryLengthAndSize) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    for (const double spread : {1.0, 40.0, 1e6}) {
      const double scale = static_cast<S>(0.7);
      const auto scores = this->values(1, width, spread, -spread / 2);
      for (const std::int64_t valid : {std::int64_t{0}, std::int64_t{1}, width / 2, width - 1, width}) {
        std::vector<double> expected(scores.size()), bounds(scores.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          expected[i] =
              static_cast<std::int64_t>(i) < valid ? scale * scores[i] : -std::numeric_limits<double>::infinity();
        }
        const auto logits = expected;
        const double largest = *std::max_element(logits.begin(), logits.end());
        reference::softmax(expected.data(), width);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          // exp turns the ε of its argument into a relative one, and is itself exact to 2^−22 (8 ε covers both passes);
          // the sum adds its length; below e^−87 float32 has zero.
          const double argument = std::isfinite(logits[i]) ? largest - logits[i] : 0;
          // The twin subtracts scaled logits, whose own rounding its exp sees.
          const double twin = std::isfinite(logits[i]) ? 0x1p-51 * (std::abs(largest) + std::abs(logits[i])) : 0;
          bounds[i] = expected[i] *
                          (this->kSum * (16 + 2 * argument + static_cast<double>(width) / 2) + this->kEpsilon + twin) +
                      (sizeof(S) == 4 ? 2e-38 : 0);
        }
        this->for_each_set([&](const auto& kernels) {
          typename TestFixture::template Row<TypeParam> row(scores), out(scores);
          kernels.softmax(row.data(), static_cast<S>(scale), valid, width, out.data());
          this->expect_near(out.wide(), expected, bounds);
          kernels.softmax(row.data(), static_cast<S>(scale), valid, width, row.data());
          EXPECT_EQ(row.wide(), out.wide()) << "in place";
        });
      }
    }
  }
}

TYPED_TEST(RowKernelsTest, SoftmaxKeepsNanAndTakesMinusInfinityForAMask) {
  using S = Statistic<TypeParam>;
  this->for_each_set([&](const auto& kernels) {
    for (const std::size_t place : {0, 1, 20, 32}) {
      auto scores = this->values(1, 33);
      scores[place] = std::nan("");
      typename TestFixture::template Row<TypeParam> row(scores);
      kernels.softmax(row.data(), S(1), 33, 33, row.data());
      for (const double value : row.wide()) EXPECT_TRUE(std::isnan(value)) << "a NaN at " << place << " was lost";
      scores[place] = -std::numeric_limits<double>::infinity();
      typename TestFixture::template Row<TypeParam> masked(scores);
      kernels.softmax(masked.data(), S(1), 33, 33, masked.data());
      EXPECT_EQ(masked.wide()[place], 0);
      for (const double value : masked.wide()) EXPECT_TRUE(std::isfinite(value));
    }
  });
}

TYPED_TEST(RowKernelsTest, SoftmaxBackward) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    auto p = this->values(1, width, 0.5, 1);
    const auto dp = this->values(2, width);
    const double scale = static_cast<S>(0.3);
    double dot = 0, size = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      dot += p[i] * dp[i];
      size += std::abs(p[i] * dp[i]);
    }
    std::vector<double> expected, bounds;
    for (std::size_t i = 0; i < p.size(); ++i) {
      expected.push_back(scale * p[i] * (dp[i] - dot));
      bounds.push_back(std::abs(scale * p[i]) * (std::abs(dp[i]) + size) * this->kSum *
                           (static_cast<double>(width) + 4) +
                       this->kEpsilon * std::abs(expected.back()));
    }
    this->for_each_set([&](const auto& kernels) {
      typename TestFixture::template Row<TypeParam> p_row(p), dp_row(dp), out(p);
      kernels.softmax_backward(p_row.data(), dp_row.data(), static_cast<S>(scale), width, out.data());
      this->expect_near(out.wide(), expected, bounds);
      kernels.softmax_backward(p_row.data(), dp_row.data(), static_cast<S>(scale), width, dp_row.data());
      EXPECT_EQ(dp_row.wide(), out.wide()) << "in place of dp";
    });
  }
}

TYPED_TEST(RowKernelsTest, ConversionsAreExactOrRoundOnce) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    auto wide = this->statistics(1, width, 1e3);
    wide[0] = std::numeric_limits<double>::infinity();
    this->for_each_set([&](const auto& kernels) {
      typename TestFixture::template Row<S> from(wide), back(wide);
      typename TestFixture::template Row<TypeParam> narrow(std::vector<double>(wide.size(), 0.0));
      kernels.narrow(from.data(), width, narrow.data());
      EXPECT_EQ(narrow.wide(), rounded(wide, kDTypeOf<TypeParam>));
      kernels.widen(narrow.data(), width, back.data());
      EXPECT_EQ(back.wide(), rounded(wide, kDTypeOf<TypeParam>));
      from.data()[0] = std::numeric_limits<S>::quiet_NaN();
      kernels.narrow(from.data(), 1, narrow.data());
      EXPECT_TRUE(std::isnan(static_cast<double>(*narrow.data())));
    });
  }
}

TYPED_TEST(RowKernelsTest, Sums) {
  using S = Statistic<TypeParam>;
  for (const std::int64_t width : kWidths) {
    const auto a = this->values(1, width), b = this->values(2, width), wide = this->statistics(3, width);
    const double scale = static_cast<S>(1.7);
    std::vector<double> sum, scaled, only_a, wide_sum, bounds, wide_bounds;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sum.push_back(a[i] + b[i]);
      scaled.push_back(scale * (a[i] + b[i]));
      only_a.push_back(scale * a[i]);
      wide_sum.push_back(wide[i] + b[i]);
      // One sum and one product of half an ε each, and the rounding of what is stored; 4 is beyond every value here.
      bounds.push_back(8 * this->kSum + this->kEpsilon * 4);
      wide_bounds.push_back(4 * this->kSum);
    }
    this->for_each_set([&](const auto& kernels) {
      typename TestFixture::template Row<TypeParam> a_row(a), b_row(b), out(a);
      typename TestFixture::template Row<S> wide_row(wide);
      kernels.scaled_sum(a_row.data(), b_row.data(), static_cast<S>(scale), width, out.data());
      this->expect_near(out.wide(), scaled, bounds);
      kernels.scaled_sum(a_row.data(), nullptr, static_cast<S>(scale), width, out.data());
      this->expect_near(out.wide(), only_a, bounds);
      kernels.add_wide(wide_row.data(), b_row.data(), width, wide_row.data());
      this->expect_near(wide_row.wide(), wide_sum, wide_bounds);
      kernels.add(a_row.data(), b_row.data(), width, a_row.data());
      this->expect_near(a_row.wide(), sum, bounds);
    });
  }
}

}  // namespace
}  // namespace isomer
