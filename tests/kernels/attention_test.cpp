#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "attention_cases.h"

namespace isomer {
namespace {

using namespace isomer::testing;  // NOLINT: tests only

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Everything of one forward and backward pass; out, lse and dout are what backward was given.
struct Pass {
  Tensor out, lse, dout;
  AttentionGradients gradients;
  std::vector<Tensor> all() const {
    return {out, lse, gradients.dq, gradients.dk, gradients.dv, gradients.dq_rope, gradients.dk_rope};
  }
};

/// [num_heads, rows] as [rows, num_heads, 1], so that one comparison serves all.
Tensor lse_as_rows(const Tensor& lse) { return lse.transpose(0, 1).unflatten(1, {lse.size(0), 1}); }

DType statistics(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

Pass make_pass(const AttentionCase& c, DType dtype, DType gradients) {
  const std::int64_t rows = rows_of(c.query_runs);
  Pass pass{.out = padded(dtype, rows, c.num_heads, c.value_width)};
  pass.lse = padded(statistics(dtype), c.num_heads, 1, rows, true).select(1, 0);
  pass.dout = padded(dtype, rows, c.num_heads, c.value_width);
  fill(pass.dout, c.query_runs, 6);
  pass.gradients = make_gradients(c, gradients);
  return pass;
}

/// The twin's results: out in double, the gradients from out and lse as rounded for the implementations.
struct Expected {
  Tensor out, lse;              // float64
  Tensor given_out, given_lse;  // what backward passes get
  AttentionGradients gradients;
};

void copy(const Tensor& from, const Tensor& to) {
  for (std::int64_t a = 0; a < from.size(0); ++a)
    for (std::int64_t b = 0; b < from.size(1); ++b)
      for (std::int64_t i = 0; i < from.size(2); ++i)
        set(to, a * to.stride(0) + b * to.stride(1) + i * to.stride(2),
            get(from, a * from.stride(0) + b * from.stride(1) + i * from.stride(2)));
}

Expected expect(const AttentionCase& c, const AttentionInputs& in, DType dtype) {
  const Pass exact = make_pass(c, DType::f64, DType::f64);
  const Pass rounded = make_pass(c, dtype, dtype);
  reference::attention_forward(in, exact.out, exact.lse);
  copy(exact.out, rounded.out);
  copy(lse_as_rows(exact.lse), lse_as_rows(rounded.lse));
  reference::attention_backward(in, rounded.out, rounded.lse, rounded.dout, exact.gradients);
  return {exact.out, exact.lse, rounded.out, rounded.lse, exact.gradients};
}

/// Compares the rows of runs within bound · ε · max(1, max|expected|), and that all else is still NaN. The 1 is the
/// size of the data: where terms cancel (dP − δ of a single key), the error is theirs.
void expect_close(std::string_view what, const Tensor& actual, const Tensor& expected,
                  const std::vector<TokenRun>& runs, double bound, DType epsilon_dtype) {
  if (!actual.defined()) return;
  std::vector<bool> named(static_cast<std::size_t>(actual.size(0)));
  for (const auto& r : runs)
    for (std::int64_t i = 0; i < r.length; ++i) named[static_cast<std::size_t>(r.row + i * r.row_stride)] = true;
  double largest = 1;
  double error = 0;
  for (std::int64_t row = 0; row < actual.size(0); ++row) {
    for (std::int64_t head = 0; head < actual.size(1); ++head) {
      for (std::int64_t i = 0; i < actual.size(2); ++i) {
        const double a = get(actual, row * actual.stride(0) + head * actual.stride(1) + i * actual.stride(2));
        const double e = get(expected, row * expected.stride(0) + head * expected.stride(1) + i * expected.stride(2));
        if (!named[static_cast<std::size_t>(row)]) {
          ASSERT_TRUE(std::isnan(a)) << what << ": row " << row << " belongs to no run and was written";
          continue;
        }
        ASSERT_EQ(std::isfinite(a), std::isfinite(e))
            << what << " row " << row << " head " << head << " column " << i << ": " << a << " for " << e;
        if (!std::isfinite(e)) {
          ASSERT_EQ(a, e) << what;
          continue;
        }
        largest = std::max(largest, std::abs(e));
        error = std::max(error, std::abs(a - e));
      }
    }
  }
  EXPECT_LE(error, bound * epsilon_of(epsilon_dtype) * largest) << what << ": largest value " << largest;
}

/// Products of bfloat16 round P and dS to 8 bits, half an ε each; results round once more. float32: a logit of 12 has
/// an error of a few ε · 12, which exp turns into a relative one. float64 likewise.
double bound_of(DType dtype) { return dtype == DType::bf16 ? 4 : 64; }

Pass run_pass(RankContext& ctx, const AttentionCase& c, const AttentionInputs& in, const Expected* expected,
              DType dtype, std::string_view implementation) {
  const Pass pass = make_pass(c, dtype, c.f32_gradients || c.accumulate ? statistics(dtype) : dtype);
  fused_attention_forward(ctx, in, pass.out, pass.lse, implementation);
  fused_attention_backward(ctx, in, expected ? expected->given_out : pass.out,
                           expected ? expected->given_lse : pass.lse, pass.dout, pass.gradients, implementation);
  return pass;
}

void expect_pass(const Pass& pass, const Expected& expected, const AttentionCase& c, DType dtype) {
  const double bound = bound_of(dtype);
  expect_close("out", pass.out, expected.out, c.query_runs, bound, dtype);
  expect_close("lse", lse_as_rows(pass.lse), lse_as_rows(expected.lse), c.query_runs, 64, statistics(dtype));
  const auto& g = pass.gradients;
  const auto& e = expected.gradients;
  expect_close("dq", g.dq, e.dq, c.query_runs, bound, dtype);
  expect_close("dk", g.dk, e.dk, c.key_runs, bound, dtype);
  expect_close("dv", g.dv, e.dv, c.key_runs, bound, dtype);
  expect_close("dq_rope", g.dq_rope, e.dq_rope, c.query_runs, bound, dtype);
  expect_close("dk_rope", g.dk_rope, e.dk_rope, c.key_runs, bound, dtype);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return !b.defined();
  if (a.shape() != b.shape()) return false;
  for (std::int64_t i = 0; i < a.size(0); ++i)
    for (std::int64_t j = 0; j < a.size(1); ++j)
      for (std::int64_t k = 0; k < (a.dim() > 2 ? a.size(2) : 1); ++k) {
        const auto at = [&](const Tensor& x) {
          const std::int64_t offset = i * x.stride(0) + j * x.stride(1) + (x.dim() > 2 ? k * x.stride(2) : 0);
          return static_cast<const char*>(x.raw()) + offset * size_of(x.dtype());
        };
        if (std::memcmp(at(a), at(b), static_cast<std::size_t>(size_of(a.dtype()))) != 0) return false;
      }
  return true;
}

void expect_same_bits(const Pass& a, const Pass& b) {
  static constexpr const char* kNames[] = {"out", "lse", "dq", "dk", "dv", "dq_rope", "dk_rope"};
  const auto all_a = a.all();
  const auto all_b = b.all();
  for (std::size_t i = 0; i < all_a.size(); ++i) EXPECT_TRUE(same_bits(all_a[i], all_b[i])) << kNames[i];
}

AttentionShape shape_of(const AttentionCase& c, DType dtype) {
  AttentionShape shape{.dtype = dtype,
                       .num_heads = c.num_heads,
                       .num_kv_heads = c.num_kv_heads,
                       .key_width = c.key_width,
                       .rope_width = c.rope_width,
                       .value_width = c.value_width};
  for (const auto& r : c.query_runs) shape.num_queries += r.length;
  for (const auto& r : c.key_runs) shape.num_keys += r.length;
  return shape;
}

class AttentionTest : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionTest, EveryImplementationAgreesWithTheTwin) {
  const AttentionCase& c = GetParam();
  RankContext one({.num_threads = 1});
  RankContext two({.num_threads = 2});
  one.memory().poison = two.memory().poison = true;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    const AttentionInputs in = make_inputs(c, dtype);
    const Expected expected = expect(c, in, dtype);
    for (const auto& implementation : attention_implementations()) {
      if (!implementation.declines(shape_of(c, dtype)).empty()) continue;
      if (implementation.kernels == nullptr && c.num_heads * rows_of(c.query_runs) > 200) continue;  // the twin itself
      SCOPED_TRACE(fmt::format("{} {}", implementation.name, name_of(dtype)));
      const Pass pass = run_pass(one, c, in, &expected, dtype, implementation.name);
      expect_pass(pass, expected, c, dtype);
      expect_same_bits(pass, run_pass(two, c, in, &expected, dtype, implementation.name));
    }
  }
}

TEST_P(AttentionTest, DryRunRecordsWhatARealRunDoes) {
  const AttentionCase& c = GetParam();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RankContext real({.num_threads = 2});
    RankContext dry({.num_threads = 2, .dry_run = true});
    run_pass(real, c, make_inputs(c, dtype), nullptr, dtype, {});
    AttentionInputs in = make_inputs(c, dtype);
    for (Tensor* x : {&in.q, &in.k, &in.v, &in.q_rope, &in.k_rope})
      if (x->defined()) *x = Tensor::unrecorded("shape", dtype, x->shape(), true);
    run_pass(dry, c, in, nullptr, dtype, {});
    EXPECT_EQ(real.memory().peak_activation_bytes(), dry.memory().peak_activation_bytes());
    EXPECT_EQ(real.memory().untracked_bytes(), dry.memory().untracked_bytes());
    EXPECT_EQ(real.ops().flops(Phase::setup), dry.ops().flops(Phase::setup));
    EXPECT_EQ(real.memory().current_activation_bytes(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTest, ::testing::ValuesIn(attention_cases()),
                         [](const auto& test) { return test.param.name; });

/// Runs of a case cut into pieces of at most `length` tokens.
std::vector<TokenRun> cut(const std::vector<TokenRun>& runs, std::int64_t length) {
  std::vector<TokenRun> pieces;
  for (const TokenRun& r : runs)
    for (std::int64_t i = 0; i < r.length; i += length)
      pieces.push_back(
          run(r.row + i * r.row_stride, std::min(length, r.length - i), r.position + i, r.segment, r.row_stride));
  return pieces;
}

TEST(Attention, HowRunsAreCutDoesNotChangeABit) {
  for (AttentionCase c : attention_cases()) {
    SCOPED_TRACE(c.name);
    RankContext ctx({});
    AttentionInputs in = make_inputs(c, DType::f32);
    const Pass whole = run_pass(ctx, c, in, nullptr, DType::f32, {});
    in.query_runs = cut(in.query_runs, 7);
    in.key_runs = cut(in.key_runs, 5);
    expect_same_bits(whole, run_pass(ctx, c, in, nullptr, DType::f32, {}));
  }
}

TEST(Attention, HalvesOfTheKeysMergeToTheWhole) {
  AttentionCase c{.name = "ring", .num_heads = 3, .num_kv_heads = 3, .rope_width = 4};
  c.query_runs = {run(0, 90, 0)};
  c.key_runs = {run(0, 90, 0)};
  c.accumulate = true;
  RankContext ctx({});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    SCOPED_TRACE(name_of(dtype));
    AttentionInputs in = make_inputs(c, dtype);
    const Expected expected = expect(c, in, dtype);
    const Pass pass = make_pass(c, dtype, statistics(dtype));
    const Pass other = make_pass(c, dtype, statistics(dtype));
    const auto rows = [](const Tensor& x) { return x.slice(0, 0, 90); };
    const auto columns = [](const Tensor& x) { return x.slice(1, 0, 90); };
    in.key_runs = {run(0, 37, 0)};
    fused_attention_forward(ctx, in, pass.out, pass.lse);
    fused_attention_backward(ctx, in, expected.given_out, expected.given_lse, pass.dout, pass.gradients);
    in.key_runs = {run(37, 53, 37)};  // queries before position 37 see none of these
    fused_attention_forward(ctx, in, other.out, other.lse);
    fused_attention_backward(ctx, in, expected.given_out, expected.given_lse, pass.dout, pass.gradients);
    merge_attention(ctx, rows(pass.out), columns(pass.lse), rows(other.out), columns(other.lse));
    expect_pass(pass, expected, c, dtype);
  }
}

TEST(Attention, MergeOfEmptyPartsIsEmpty) {
  RankContext ctx({});
  const Tensor out = Tensor::unrecorded("out", DType::f32, {2, 1, 3});
  const Tensor lse = Tensor::unrecorded("lse", DType::f32, {1, 2});
  const Tensor other = Tensor::unrecorded("other", DType::f32, {2, 1, 3});
  const Tensor other_lse = Tensor::unrecorded("other_lse", DType::f32, {1, 2});
  for (std::int64_t i = 0; i < 6; ++i) {
    set(out, i, std::nan(""));  // under lse = −∞ nothing may be read
    set(other, i, i < 3 ? std::nan("") : 7.0);
  }
  set(lse, 0, -kInf);
  set(lse, 1, -kInf);
  set(other_lse, 0, -kInf);
  set(other_lse, 1, 2.5);
  merge_attention(ctx, out, lse, other, other_lse);
  for (std::int64_t i = 0; i < 6; ++i) EXPECT_EQ(get(out, i), i < 3 ? 0.0 : 7.0);
  EXPECT_EQ(get(lse, 0), -kInf);
  EXPECT_EQ(get(lse, 1), 2.5);
  set(other_lse, 1, -kInf);
  set(other, 3, std::nan(""));
  merge_attention(ctx, out, lse, other, other_lse);
  EXPECT_EQ(get(out, 3), 7.0);
}

/// Σ weights · out of the twin, as a function of one input element.
double objective(const AttentionCase& c, const AttentionInputs& in, const Tensor& weights) {
  const Pass pass = make_pass(c, DType::f64, DType::f64);
  reference::attention_forward(in, pass.out, pass.lse);
  double sum = 0;
  for_each_element(pass.out, c.query_runs, [&](std::int64_t at) { sum += get(pass.out, at) * get(weights, at); });
  return sum;
}

TEST(Attention, TwinGradientsAreThoseOfFiniteDifferences) {
  AttentionCase c{
      .name = "differences", .num_heads = 4, .num_kv_heads = 2, .key_width = 3, .rope_width = 2, .value_width = 2};
  c.query_runs = {run(0, 4, 1), run(4, 2, 0, 1)};
  c.key_runs = {run(1, 5, 0), run(6, 2, 0, 1)};
  const AttentionInputs in = make_inputs(c, DType::f64);
  const Pass pass = make_pass(c, DType::f64, DType::f64);
  reference::attention_forward(in, pass.out, pass.lse);
  reference::attention_backward(in, pass.out, pass.lse, pass.dout, pass.gradients);
  const auto& g = pass.gradients;
  const std::tuple<Tensor, Tensor, std::vector<TokenRun>> pairs[] = {{in.q, g.dq, c.query_runs},
                                                                     {in.k, g.dk, c.key_runs},
                                                                     {in.v, g.dv, c.key_runs},
                                                                     {in.q_rope, g.dq_rope, c.query_runs},
                                                                     {in.k_rope, g.dk_rope, c.key_runs}};
  constexpr double kStep = 1e-5;  // error of a central difference: step² · third derivative, ε / step
  for (const auto& [input, gradient, runs] : pairs) {
    for_each_element(input, runs, [&](std::int64_t at) {
      const double before = get(input, at);
      set(input, at, before + kStep);
      const double above = objective(c, in, pass.dout);
      set(input, at, before - kStep);
      const double below = objective(c, in, pass.dout);
      set(input, at, before);
      EXPECT_NEAR(get(gradient, at), (above - below) / (2 * kStep), 1e-7);
    });
  }
}

TEST(Attention, CountsExactPairs) {
  AttentionCase c{
      .name = "pairs", .num_heads = 2, .num_kv_heads = 1, .key_width = 8, .rope_width = 2, .value_width = 4};
  c.query_runs = {run(0, 3, 1), run(3, 1, 0, 1)};
  c.key_runs = {run(0, 4, 0), run(4, 2, 0, 1)};
  RankContext ctx({});
  run_pass(ctx, c, make_inputs(c, DType::f32), nullptr, DType::f32, {});
  const double pairs = 2 * (2 + 3 + 4 + 1);
  EXPECT_EQ(ctx.ops().flops(Phase::setup), 2 * pairs * (10 + 4) + 2 * pairs * (3 * 10 + 2 * 4));
}

TEST(Attention, RejectsWhatItCantCompute) {
  AttentionCase c{.name = "errors", .num_heads = 4, .num_kv_heads = 2, .rope_width = 4};
  c.query_runs = c.key_runs = {run(0, 3, 0)};
  RankContext ctx({});
  const AttentionInputs good = make_inputs(c, DType::f32);
  const Pass pass = make_pass(c, DType::f32, DType::f32);
  const auto forward = [&](auto&& change) {
    AttentionInputs in = good;
    change(in);
    fused_attention_forward(ctx, in, pass.out, pass.lse);
  };
  const auto expect_error = [&](auto&& change, const std::string& part) {
    try {
      forward(change);
      ADD_FAILURE() << "no error about " << part;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect_error([](auto& in) { in.k_rope = {}; }, "q_rope is given and k_rope is missing");
  expect_error([](auto& in) { in.query_runs[0].length = 99; }, "length 99");
  expect_error([](auto& in) { in.scale = 0; }, "scale = 0");
  expect_error([](auto& in) { in.k = padded(DType::bf16, 5, 2, 20); }, "k is bf16");
  expect_error([](auto& in) { in.k = padded(DType::f32, 5, 3, 20); }, "4 heads of q can't share 3");
  expect_error([](auto& in) { in.v = in.v.transpose(1, 2).slice(1, 0, 2); }, "the innermost stride of v is 21");
  EXPECT_THROW(fused_attention_forward(ctx, good, pass.out, pass.lse, "no_such"), std::invalid_argument);
  EXPECT_THROW(fused_attention_forward(ctx, good, pass.out, pass.lse, "f64_blas"), std::invalid_argument);
  AttentionGradients narrow = make_gradients(c, DType::f32);
  narrow.dk = padded(DType::bf16, 5, 2, 20);
  EXPECT_THROW(fused_attention_backward(ctx, good, pass.out, pass.lse, pass.dout, narrow), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
