// The row kernels of feed-forward layers and of cross-entropy, of every instruction set and in every type, against
// formulas in double.
#include <gtest/gtest.h>

#include "kernels/cpu/elementwise.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using cpu::row_kernels_of;
using cpu::Statistic;
using testing::max_difference;
using testing::noise_values;
using testing::rounded;

constexpr std::int64_t kWidths[] = {1, 2, 7, 15, 16, 17, 33, 64, 257};

double sigma(double x) { return 1 / (1 + std::exp(-x)); }

template <class U>
std::vector<U> row(const std::vector<double>& values) {
  std::vector<U> result;
  for (const double value : values) result.push_back(static_cast<U>(value));
  result.push_back(static_cast<U>(-12345.0));  // nothing may touch it
  return result;
}
template <class U>
std::vector<double> wide(const std::vector<U>& values) {
  EXPECT_EQ(static_cast<double>(values.back()), static_cast<double>(static_cast<U>(-12345.0)));
  return {values.begin(), values.end() - 1};
}

template <class T>
class FfnRowKernels : public ::testing::Test {
 protected:
  // Stored values reach 16: half an ε of those. Within, an exp of 2^−22 and some ten operations.
  static constexpr double kBound = 16 * (epsilon_of(kDTypeOf<T>) + 8 * epsilon_of(kDTypeOf<Statistic<T>>));

  static std::vector<double> values(std::uint64_t seed, std::int64_t width, double scale = 1) {
    return rounded(noise_values(seed, width, scale), kDTypeOf<T>);
  }
  template <class Body>
  static void for_each_case(Body&& body) {
    for (const auto set : cpu::available_instruction_sets()) {
      for (const std::int64_t width : kWidths) {
        SCOPED_TRACE(fmt::format("{}, width {}", cpu::name_of(set), width));
        body(row_kernels_of<T>(set), width);
      }
    }
  }
};

using ElementTypes = ::testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(FfnRowKernels, ElementTypes);

TYPED_TEST(FfnRowKernels, SiluMulAndItsDerivative) {
  this->for_each_case([&](const auto& kernels, std::int64_t width) {
    auto g = this->values(1, width, 4);
    const auto u = this->values(2, width, 2), d = this->values(3, width);
    g[0] = -100;  // σ underflows, and must not become NaN
    std::vector<double> out, dgate, dup;
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double s = sigma(g[i]);
      out.push_back(g[i] * s * u[i]);
      dgate.push_back(d[i] * u[i] * (s + g[i] * s * (1 - s)));
      dup.push_back(d[i] * g[i] * s);
    }
    auto gate = row<TypeParam>(g), up = row<TypeParam>(u), dout = row<TypeParam>(d), y = row<TypeParam>(u);
    kernels.silu_mul(gate.data(), up.data(), width, y.data());
    EXPECT_LE(max_difference(wide(y), out), this->kBound);
    kernels.silu_mul_backward(gate.data(), up.data(), dout.data(), width, gate.data(), up.data());
    EXPECT_LE(max_difference(wide(gate), dgate), this->kBound);
    EXPECT_LE(max_difference(wide(up), dup), this->kBound);
  });
}

TYPED_TEST(FfnRowKernels, SigmoidDotAndScaledSum) {
  using S = Statistic<TypeParam>;
  this->for_each_case([&](const auto& kernels, std::int64_t width) {
    const auto a = this->values(1, width, 4), b = this->values(2, width);
    const auto sums = rounded(noise_values(3, width), kDTypeOf<S>);
    double dot = 0;
    std::vector<double> sigmas, added;
    for (std::size_t i = 0; i < a.size(); ++i) {
      dot += a[i] * b[i];
      sigmas.push_back(sigma(a[i]));
      added.push_back(sums[i] + 0.75 * a[i]);
    }
    auto x = row<TypeParam>(a), y = row<TypeParam>(b);
    auto out = row<S>(sums);
    // Up to 257 products of up to 12.
    EXPECT_NEAR(static_cast<double>(kernels.dot(x.data(), y.data(), width)), dot,
                static_cast<double>(width) * 12 * epsilon_of(kDTypeOf<S>));
    kernels.add_scaled(x.data(), S(0.75), width, out.data());
    EXPECT_LE(max_difference(wide(out), added), 16 * epsilon_of(kDTypeOf<S>));
    kernels.sigmoid(x.data(), width, x.data());
    EXPECT_LE(max_difference(wide(x), sigmas), this->kBound);
  });
}

TYPED_TEST(FfnRowKernels, CrossEntropyAndItsDerivative) {
  using S = Statistic<TypeParam>;
  this->for_each_case([&](const auto& kernels, std::int64_t width) {
    const auto z = rounded(noise_values(1, width, 6), kDTypeOf<S>);
    const std::int64_t target = width / 3;
    const double logit_scale = 0.5, gradient_scale = 3;
    double sum = 0;
    for (const double value : z) sum += std::exp(logit_scale * value);
    const double loss = std::log(sum) - logit_scale * z[static_cast<std::size_t>(target)];
    std::vector<double> gradient;
    for (const double value : z) gradient.push_back(gradient_scale * logit_scale * std::exp(logit_scale * value) / sum);
    gradient[static_cast<std::size_t>(target)] -= gradient_scale * logit_scale;
    auto logits = row<S>(z);
    auto dlogits = row<TypeParam>(z);
    const auto call = [&](TypeParam* out) {
      return kernels.cross_entropy(logits.data(), width, S(logit_scale), target, S(gradient_scale), out).loss;
    };
    const double bound = 64 * epsilon_of(kDTypeOf<S>);  // an exp, up to 17 sums a lane, logits of 10
    EXPECT_NEAR(call(nullptr), loss, bound);
    EXPECT_EQ(wide(logits), z);
    EXPECT_NEAR(call(dlogits.data()), loss, bound);
    EXPECT_LE(max_difference(wide(dlogits), gradient), bound + 1.5 * epsilon_of(kDTypeOf<TypeParam>));
  });
}

}  // namespace
}  // namespace isomer
