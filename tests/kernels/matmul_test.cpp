// Matrix products against the plain double twin: every type, layout and odd size, results guarded by NaN.
#include "kernels/matmul.h"

#include <cblas.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "full_tests.h"
#include "kernels/cpu/gemm.h"
#include "kernels/reference/plain_ops.h"
#include "tensor_values.h"

namespace isomer {
namespace {

using testing::noise_values;
using testing::rounded;
using testing::set_values;
using testing::tensor_of;
using testing::values_of;

/// How an operand lies in memory.
enum class Lie { dense, transposed, padded, padded_transposed, every_second_row };

/// [batch, rows, columns] holding `values`, as a view that lies like that in NaN.
Tensor operand(const std::vector<double>& values, DType dtype, std::int64_t batch, std::int64_t rows,
               std::int64_t columns, Lie lie) {
  const bool transposed = lie == Lie::transposed || lie == Lie::padded_transposed;
  const std::int64_t pad = lie == Lie::padded || lie == Lie::padded_transposed ? 3 : 0;
  const std::int64_t step = lie == Lie::every_second_row ? 2 : 1;
  const std::int64_t outer = (transposed ? columns : rows) * step, inner = (transposed ? rows : columns) + pad;
  const Tensor whole = Tensor::unrecorded("operand", dtype, {batch, outer, inner});
  set_values(whole, std::vector<double>(static_cast<std::size_t>(whole.numel()), std::nan("")));
  Tensor view = whole.slice(2, 0, inner - pad).strided_slice(1, 0, outer / step, step);
  if (transposed) view = view.transpose(1, 2);
  set_values(view, values);
  return view;
}

struct Product {
  std::int64_t batch, m, n, k;
  DType in = DType::f32, out = DType::f32;
  Lie lie_a = Lie::dense, lie_b = Lie::dense;
  bool repeat_a = false, repeat_b = false;  // one matrix for the whole batch, by a stride of 0
  bool accumulate = false;
  int num_threads = 1;
};

std::string describe(const Product& p) {
  return fmt::format("{}×[{}, {}]·[{}, {}] {}→{}, a lies {}{}, b lies {}{}{}, {} threads", p.batch, p.m, p.k, p.k, p.n,
                     name_of(p.in), name_of(p.out), static_cast<int>(p.lie_a), p.repeat_a ? " repeated" : "",
                     static_cast<int>(p.lie_b), p.repeat_b ? " repeated" : "", p.accumulate ? ", accumulating" : "",
                     p.num_threads);
}

std::vector<double> magnitudes(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

/// Σ|a|·|b| bounds what the order of a sum costs: k − 1 additions and k products of half an ε each, whatever the
/// order; accumulation adds one more, and the result rounds once to its type.
void expect_product(const std::vector<double>& actual, const std::vector<double>& a, const std::vector<double>& b,
                    const std::vector<double>& before, const Product& p) {
  std::vector<double> expected(static_cast<std::size_t>(p.batch * p.m * p.n)), sizes(expected.size());
  const auto abs_a = magnitudes(a), abs_b = magnitudes(b);
  for (std::int64_t i = 0; i < p.batch; ++i) {
    const std::int64_t at_a = p.repeat_a ? 0 : i * p.m * p.k, at_b = p.repeat_b ? 0 : i * p.k * p.n;
    reference::matmul(a.data() + at_a, b.data() + at_b, p.m, p.n, p.k, expected.data() + i * p.m * p.n);
    reference::matmul(abs_a.data() + at_a, abs_b.data() + at_b, p.m, p.n, p.k, sizes.data() + i * p.m * p.n);
  }
  const double sum_epsilon = epsilon_of(p.in == DType::f64 ? DType::f64 : DType::f32);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double start = p.accumulate ? before[i] : 0;
    const double bound = sum_epsilon * static_cast<double>(p.k + 1) * (sizes[i] + std::abs(start)) +
                         epsilon_of(p.out) * std::abs(expected[i] + start);
    ASSERT_LE(std::abs(actual[i] - expected[i] - start), bound) << describe(p) << " at " << i;
  }
}

/// Runs it, checks it and the NaN around it; returns the result.
std::vector<double> check(const Product& p) {
  const auto a = rounded(noise_values(1, (p.repeat_a ? 1 : p.batch) * p.m * p.k), p.in);
  const auto b = rounded(noise_values(2, (p.repeat_b ? 1 : p.batch) * p.k * p.n), p.in);
  Tensor left = operand(a, p.in, p.repeat_a ? 1 : p.batch, p.m, p.k, p.lie_a);
  Tensor right = operand(b, p.in, p.repeat_b ? 1 : p.batch, p.k, p.n, p.lie_b);
  if (p.repeat_a) left = left.select(0, 0).broadcast(0, p.batch);
  if (p.repeat_b) right = right.select(0, 0).broadcast(0, p.batch);
  const Tensor whole = Tensor::unrecorded("c", p.out, {p.batch, p.m + 1, p.n + 5});
  set_values(whole, std::vector<double>(static_cast<std::size_t>(whole.numel()), std::nan("")));
  const Tensor result = whole.slice(1, 0, p.m).slice(2, 0, p.n);
  const auto before = rounded(noise_values(3, result.numel()), p.out);
  if (p.accumulate) set_values(result, before);
  RankContext ctx({.num_threads = p.num_threads});
  if (p.batch == 1 && !p.repeat_a && !p.repeat_b) {
    matmul(ctx, "product", left.select(0, 0), right.select(0, 0), result.select(0, 0), p.accumulate);
  } else {
    matmul(ctx, "product", left, right, result, p.accumulate);
  }
  auto values = values_of(result);
  expect_product(values, a, b, before, p);
  for (const double outside : values_of(whole.slice(2, p.n, 5))) EXPECT_TRUE(std::isnan(outside)) << describe(p);
  for (const double outside : values_of(whole.slice(1, p.m, 1))) EXPECT_TRUE(std::isnan(outside)) << describe(p);
  return values;
}

constexpr std::pair<DType, DType> kTypes[] = {
    {DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}, {DType::f64, DType::f64}};
constexpr Lie kLies[] = {Lie::dense, Lie::transposed, Lie::padded, Lie::padded_transposed, Lie::every_second_row};

TEST(Matmul, EverySizeLieAndType) {
  constexpr std::array<std::int64_t, 3> kSizes[] = {{1, 1, 1},    {1, 7, 5},    {7, 1, 5},   {5, 7, 1}, {1, 1, 9},
                                                    {0, 3, 2},    {3, 0, 2},    {3, 2, 0},   {2, 2, 2}, {3, 5, 64},
                                                    {33, 17, 65}, {64, 48, 32}, {127, 31, 3}};
  for (const auto& [in, out] : kTypes) {
    for (const auto& [m, n, k] : kSizes) {
      for (const Lie a : kLies) {
        for (const Lie b : kLies) {
          check({.batch = 1, .m = m, .n = n, .k = k, .in = in, .out = out, .lie_a = a, .lie_b = b});
        }
      }
      check({.batch = 3, .m = m, .n = n, .k = k, .in = in, .out = out, .lie_a = Lie::padded, .lie_b = Lie::transposed});
      check({.batch = 3, .m = m, .n = n, .k = k, .in = in, .out = out, .repeat_a = true});
      check({.batch = 3, .m = m, .n = n, .k = k, .in = in, .out = out, .lie_b = Lie::transposed, .repeat_b = true});
    }
  }
}

// The shapes of a decode step, which have a kernel of their own where the processor has products of bfloat16.
TEST(Matmul, FewRows) {
  for (const DType out : {DType::bf16, DType::f32}) {
    for (const std::int64_t m : {1, 2, 3, 4, 5}) {
      for (const std::int64_t k : {63, 64, 65, 97, 128, 161, 300}) {
        for (const Lie a : {Lie::dense, Lie::padded, Lie::every_second_row}) {
          Product p{.batch = 1, .m = m, .n = 7, .k = k, .in = DType::bf16, .out = out, .lie_a = a};
          for (p.lie_b = Lie::transposed;; p.lie_b = Lie::padded_transposed) {
            check(p);
            p.accumulate = out == DType::f32;
            check(p);
            p.accumulate = false;
            if (p.lie_b == Lie::padded_transposed) break;
          }
        }
        check({.batch = 3, .m = m, .n = 1030, .k = k, .in = DType::bf16, .out = out, .lie_b = Lie::transposed});
        check({.batch = 3,
               .m = m,
               .n = 5,
               .k = k,
               .in = DType::bf16,
               .out = out,
               .lie_b = Lie::transposed,
               .repeat_b = true});
      }
    }
  }
}

TEST(Matmul, SeveralTiles) {
  for (const auto& [in, out] : kTypes) {
    check({.batch = 1, .m = 513, .n = 5, .k = 7, .in = in, .out = out});
    check({.batch = 1, .m = 5, .n = 1025, .k = 9, .in = in, .out = out, .lie_b = Lie::transposed});
    check({.batch = 2, .m = 515, .n = 1029, .k = 6, .in = in, .out = out, .lie_a = Lie::padded_transposed});
  }
}

TEST(Matmul, Accumulates) {
  for (const DType in : {DType::f32, DType::bf16, DType::f64}) {
    const DType out = in == DType::f64 ? DType::f64 : DType::f32;
    for (const std::int64_t k : {0, 1, 33}) {
      check({.batch = 1, .m = 5, .n = 9, .k = k, .in = in, .out = out, .accumulate = true});
      check({.batch = 2, .m = 600, .n = 9, .k = k, .in = in, .out = out, .lie_a = Lie::transposed, .accumulate = true});
    }
  }
}

TEST(Matmul, BitsDoNotDependOnTheThreadBudget) {
  for (const auto& [in, out] : kTypes) {
    Product p{.batch = 3, .m = 700, .n = 1100, .k = 11, .in = in, .out = out, .lie_b = Lie::transposed};
    const auto one = check(p);
    for (const int threads : {2, 3}) {
      p.num_threads = threads;
      EXPECT_EQ(check(p), one) << describe(p);
    }
  }
}

TEST(Matmul, RefusesWhatItCanNotDo) {
  RankContext ctx({});
  const auto tensor = [](DType dtype, Shape shape) { return Tensor::unrecorded("t", dtype, std::move(shape)); };
  const Tensor a = tensor(DType::bf16, {4, 6}), b = tensor(DType::bf16, {6, 8}), c = tensor(DType::bf16, {4, 8});
  EXPECT_THROW(matmul(ctx, "accumulate", a, b, c, true), CheckFailure);
  EXPECT_THROW(matmul(ctx, "inner", a, a, c), CheckFailure);
  EXPECT_THROW(matmul(ctx, "types", a, tensor(DType::f32, {6, 8}), c), CheckFailure);
  EXPECT_THROW(matmul(ctx, "wider out", a, b, tensor(DType::f64, {4, 8})), CheckFailure);
  EXPECT_THROW(matmul(ctx, "axes", a, b, c.unflatten(0, {1, 4})), CheckFailure);
  EXPECT_THROW(matmul(ctx, "result strides", a, b, tensor(DType::bf16, {8, 4}).transpose(0, 1)), CheckFailure);
  const Tensor holes = tensor(DType::bf16, {8, 12}).strided_slice(1, 0, 6, 2).strided_slice(0, 0, 4, 2);
  EXPECT_THROW(matmul(ctx, "operand strides", holes, b, c), CheckFailure);
  EXPECT_THROW(matmul(ctx, "repeated rows", tensor(DType::bf16, {6}).broadcast(0, 4), b, c), CheckFailure);
}

TEST(Gemm, WidenedBf16GivesWhatProductsOfBf16Give) {
  for (const DType out : {DType::bf16, DType::f32}) {
    for (const bool transposed_a : {false, true}) {
      for (const bool transposed_b : {false, true}) {
        for (const bool accumulate : {false, true}) {
          if (accumulate && out == DType::bf16) continue;
          const Product p{
              .batch = 1, .m = 19, .n = 33, .k = 21, .in = DType::bf16, .out = out, .accumulate = accumulate};
          const auto a = rounded(noise_values(1, p.m * p.k), p.in), b = rounded(noise_values(2, p.k * p.n), p.in);
          const Tensor left = operand(a, p.in, 1, p.m, p.k, transposed_a ? Lie::padded_transposed : Lie::padded);
          const Tensor right = operand(b, p.in, 1, p.k, p.n, transposed_b ? Lie::padded_transposed : Lie::padded);
          const Tensor c = operand(noise_values(3, p.m * p.n), out, 1, p.m, p.n, Lie::padded);
          const auto before = values_of(c);
          cpu::gemm({.m = p.m,
                     .n = p.n,
                     .k = p.k,
                     .in = p.in,
                     .out = out,
                     .a = {left.raw(), left.stride(transposed_a ? 2 : 1), transposed_a},
                     .b = {right.raw(), right.stride(transposed_b ? 2 : 1), transposed_b},
                     .c = c.raw(),
                     .ldc = c.stride(1),
                     .accumulate = accumulate},
                    cpu::Bf16Products::widened);
          expect_product(values_of(c), a, b, before, p);
        }
      }
    }
  }
}

struct ConcurrentProducts {
  std::int64_t rows, columns, width;
  Lie lie_a, lie_b;
  int repetitions;  // a caller
};

/// How many of the products that eight callers make at once differ from one made alone.
int num_wrong(const ConcurrentProducts& p) {
  constexpr int kHeads = 8, kCallers = 8;
  const Tensor a = operand(noise_values(1, kHeads * p.rows * p.width), DType::f64, kHeads, p.rows, p.width, p.lie_a);
  const Tensor b =
      operand(noise_values(2, kHeads * p.width * p.columns), DType::f64, kHeads, p.width, p.columns, p.lie_b);
  const auto product = [&](RankContext& ctx) {
    const Tensor c = Tensor::unrecorded("c", DType::f64, {kHeads, p.rows, p.columns});
    matmul(ctx, "product", a, b, c);
    return c;
  };
  RankContext alone({});
  const Tensor expected = product(alone);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&] {
      RankContext ctx({});
      for (int repetition = 0; repetition < p.repetitions; ++repetition) {
        const Tensor again = product(ctx);
        if (std::memcmp(again.raw(), expected.raw(), static_cast<std::size_t>(expected.nbytes())) != 0) ++wrong;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  return wrong;
}

TEST(Matmul, OpenBlasIsTheBuildForConcurrentCallersOnOneThread) {
  RankContext ctx({});
  const Tensor one = tensor_of({2}, DType::f64, {1, 1});
  matmul(ctx, "first use", one, one, one);
  EXPECT_EQ(openblas_get_parallel(), OPENBLAS_THREAD) << openblas_get_config();
  EXPECT_EQ(openblas_get_num_threads(), 1);
}

// The serial build of OpenBLAS hands one scratch buffer to concurrent callers now and then: up to one in twenty such
// products is wrong there, and most runs of this test see some.
TEST(Matmul, Float64ProductsOfConcurrentRanksDoNotMeet) {
  const int factor = testing::full_tests() ? 20 : 1;
  EXPECT_EQ(num_wrong({100, 103, 98, Lie::transposed, Lie::dense, 100 * factor}), 0);
  EXPECT_EQ(num_wrong({100, 103, 98, Lie::dense, Lie::transposed, 100 * factor}), 0);
  EXPECT_EQ(num_wrong({37, 40, 35, Lie::dense, Lie::transposed, 700 * factor}), 0);
}

}  // namespace
}  // namespace isomer
