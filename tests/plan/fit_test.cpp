#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "plan/doubts.h"
#include "plan/fit.h"
#include "plan/fit_report.h"
#include "plan/fit_surfaces.h"
#include "plan/hardware_json.h"
#include "plan/samples.h"

namespace isomer {
namespace {

using testing::HasSubstr;

constexpr Rates kRates{1e15, 4e12};

Curve truth() {
  Curve curve;
  curve.launch_s = 4e-6;
  curve.compute_share = 0.6;
  curve.bytes_share = 0.75;
  curve.exponent = 2;
  return curve;
}

std::vector<Operation> shapes() {
  std::vector<Operation> result;
  for (std::int64_t m = 1; m <= 16384; m *= 2)
    for (std::int64_t n = 128; n <= 16384; n *= 2)
      for (std::int64_t k = 128; k <= 16384; k *= 2)
        result.push_back({.kind = OperationKind::gemm, .m = m, .n = n, .k = k});
  return result;
}

SampleFamily synthetic(const Curve& curve, const std::function<double(std::size_t)>& noise) {
  SampleFamilies families;
  std::size_t i = 0;
  for (const Operation& op : shapes())
    add_sample(families, Curve{}, op, predicted_seconds(curve, op, kRates) * noise(i++));
  return families.begin()->second;
}

TEST(Fit, RecoversKnownCoefficients) {
  const Curve found = fit_curve(synthetic(truth(), [](std::size_t) { return 1.0; }), kRates);
  EXPECT_NEAR(found.launch_s / 4e-6, 1, 0.02);
  EXPECT_NEAR(found.compute_share, 0.6, 0.02);
  EXPECT_NEAR(found.bytes_share, 0.75, 0.02);
  EXPECT_NEAR(found.exponent, 2, 0.15);
  EXPECT_LT(found.held_back.mean, 0.005);
}

TEST(Fit, RecoversAnEfficiencySurface) {
  Curve curve = truth();
  curve.surfaces = {{.axes = {{.feature = 0, .first = 0, .step = 7, .count = 3}}, .values = {0.3, -0.4, 0.2}}};
  const Curve found = fit_curve(synthetic(curve, [](std::size_t) { return 1.0; }), kRates);
  EXPECT_LT(found.held_back.mean, 0.03);
  EXPECT_LT(found.used.mean, 0.03);
}

TEST(Fit, OutliersDoNotMoveIt) {
  // Every 20th row took ten times as long.
  const SampleFamily family = synthetic(truth(), [](std::size_t i) { return i % 20 == 7 ? 10.0 : 1.0; });
  Curve found = fit_curve(family, kRates);
  std::vector<double> clean;
  for (const Operation& op : shapes())
    clean.push_back(std::fabs(predicted_seconds(found, op, kRates) / predicted_seconds(truth(), op, kRates) - 1));
  EXPECT_LT(summarise(clean).mean, 0.03);
  EXPECT_GT(found.used.mean, 0.03) << "errors count all rows, outliers too";
}

TEST(Fit, RowsHeldBackTakeNoPart) {
  SampleFamily family = synthetic(truth(), [](std::size_t i) { return 1 + 0.1 * std::sin(static_cast<double>(i)); });
  const auto before = curve_json(fit_curve(family, kRates));
  std::int64_t held = 0;
  for (TimedOperation& sample : family.samples) {
    if (!sample.held_back) continue;
    ++held;
    sample.seconds *= 3;
  }
  auto after = curve_json(fit_curve(family, kRates));
  EXPECT_GT(after["held_back"]["mean_error"].get<double>(), 0.5);
  after["held_back"] = before["held_back"];
  EXPECT_EQ(before, after);
  EXPECT_NEAR(static_cast<double>(held) / static_cast<double>(family.samples.size()), 0.2, 0.04);
}

TEST(Fit, IsDeterministic) {
  const SampleFamily family =
      synthetic(truth(), [](std::size_t i) { return 1 + 0.2 * std::cos(static_cast<double>(i)); });
  EXPECT_EQ(curve_json(fit_curve(family, kRates)), curve_json(fit_curve(family, kRates)));
}

TEST(Fit, SplitGoesByShapeNotByTime) {
  SampleFamilies a, b;
  for (const Operation& op : shapes()) {
    add_sample(a, Curve{}, op, 1);
    add_sample(b, Curve{}, op, 2);
  }
  const auto &left = a.begin()->second.samples, &right = b.begin()->second.samples;
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_EQ(left[i].held_back, right[i].held_back);
}

TEST(Fit, SmallTablesGetFewKnots) {
  for (const std::size_t rows : {8u, 30u, 200u}) {
    SampleFamily family;
    for (const Operation& op : shapes())
      if (family.samples.size() < rows) family.samples.push_back({op, 1e-5, false});
    int knots = 0;
    for (const Surface& surface : surfaces_for(family)) knots += num_values(surface.axes);
    EXPECT_LE(knots, static_cast<int>(rows / 2)) << rows;
  }
}

TEST(Fit, CornersWeighOneAndHitTheirKnots) {
  const std::vector<Axis> axes = {{.feature = 0, .first = 1, .step = 2, .count = 4},
                                  {.feature = 2, .count = 1},
                                  {.feature = 1, .first = 0, .step = 1, .count = 3}};
  for (double x = -1; x < 9; x += 0.37) {
    for (double y = -1; y < 4; y += 0.29) {
      const Corners corners = corners_of(axes, {x, y, 5});
      double weight = 0, first = 0, second = 0;
      for (int i = 0; i < corners.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        ASSERT_LT(corners.index[at], num_values(axes));
        weight += corners.weight[at];
        first += corners.weight[at] * (1 + 2 * (corners.index[at] / 3));
        second += corners.weight[at] * (corners.index[at] % 3);
      }
      EXPECT_NEAR(weight, 1, 1e-12);
      EXPECT_NEAR(first, std::clamp(x, 1.0, 7.0), 1e-12);
      EXPECT_NEAR(second, std::clamp(y, 0.0, 2.0), 1e-12);
    }
  }
}

TEST(Fit, NearestRankPercentile) {
  std::vector<double> errors;
  for (int i = 1; i <= 100; ++i) errors.push_back(i);
  EXPECT_EQ(summarise(errors).p95, 95);
  EXPECT_EQ(summarise(errors).mean, 50.5);
  EXPECT_EQ(summarise({1, 2, 3}).p95, 3);
  EXPECT_EQ(summarise({}).rows, 0);
}

class UserTable : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    const std::string path = testing::TempDir() + "table.csv";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  std::string complaint(const std::string& text) {
    try {
      load_table(write(text));
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST_F(UserTable, ReadsOperations) {
  const auto families =
      load_table(write("operation,compute,storage,m,n,k,devices,bytes,seconds\r\n"
                       "gemm,fp8,fp8,4,8,16,,,1e-5\r\nall_reduce,bf16,bf16,,,,8,1e6,2e-5\r\n"));
  ASSERT_EQ(families.size(), 2u);
  const TimedOperation& product = families.at("gemm fp8").samples.front();
  EXPECT_EQ(product.operation.n, 8);
  EXPECT_EQ(product.seconds, 1e-5);
  EXPECT_EQ(families.at("all_reduce bf16").samples.front().operation.devices, 8);
}

TEST_F(UserTable, WrongRowsAreNamed) {
  const std::string head = "operation,compute,m,n,k,seconds\n";
  EXPECT_THAT(complaint(head + "gemm,bf16,1,2,3\n"), HasSubstr(":2: 5 cells, where the first line names 6"));
  EXPECT_THAT(complaint(head + "gem,bf16,1,2,3,1\n"), HasSubstr("row 1: operation = 'gem': expected one of gemm"));
  EXPECT_THAT(complaint(head + "gemm,bf16,1,2,3,0\n"), HasSubstr("seconds = '0'"));
  EXPECT_THAT(complaint(head + "gemm,bf16,1,2,3,nan\n"), HasSubstr("seconds = 'nan'"));
  EXPECT_THAT(complaint(head + "gemm,bf16,-1,2,3,1\n"), HasSubstr("m = '-1'"));
  EXPECT_THAT(complaint(head + "gemm,bf16,1.5,2,3,1\n"), HasSubstr("m = '1.5'"));
  EXPECT_THAT(complaint(head + "gemm,bf16,0,2,3,1\n"), HasSubstr("all above 0"));
  EXPECT_THAT(complaint(head + "moe,bf16,1,2,3,1\n"), HasSubstr("all above 0"));
  EXPECT_THAT(complaint(head), HasSubstr("no rows"));
  EXPECT_THAT(complaint(""), HasSubstr("empty"));
  EXPECT_THAT(complaint("operation,compute,m,n,k\ngemm,bf16,1,2,3\n"), HasSubstr("there is no column 'seconds'"));
  EXPECT_THAT(complaint(std::string("\x1f\x8b\x08\x00trash", 9)), HasSubstr("table.csv"));
}

TEST_F(UserTable, FitsIntoAHardwareFileThatPricesLikeTheTable) {
  std::string text = "operation,compute,m,n,k,seconds\n";
  Curve curve = truth();
  const Hardware base = load_hardware("h200");
  for (const Operation& op : shapes())
    text += fmt::format("gemm,bf16,{},{},{},{:.9g}\n", op.m, op.n, op.k,
                        predicted_seconds(curve, op, rates_of(base, curve)));
  const auto families = load_table(write(text));
  const auto curves = fit_all(base, families, [](const std::string&) {});
  ASSERT_EQ(curves.size(), 1u);
  Hardware fitted = base;
  fitted.curves = std::make_shared<const CurveSet>(curves);
  for (const Operation& op : shapes())
    EXPECT_NEAR(seconds_of(fitted, op) / predicted_seconds(curve, op, rates_of(base, curve)), 1, 0.05);
  const auto report = validate(fitted, families, 2);
  ASSERT_EQ(report.size(), 1u);
  EXPECT_LT(report.front().held_back.mean, 0.01);
  EXPECT_EQ(report.front().worst.size(), 2u);
}

TEST_F(UserTable, OneHeadShapeIsATable) {
  // Its axes over heads have one knot; an empty storage is the compute's.
  std::string text = "operation,compute,storage,batch,heads,kv_heads,head_dim,context,seconds\n";
  for (const int batch : {1, 2, 4, 8}) {
    for (const int context : {1024, 4096, 16384}) {
      text += fmt::format("decode_gqa,bf16,,{},64,8,128,{},{:.9g}\n", batch, context, 4e-6 + 1e-9 * batch * context);
    }
  }
  const auto families = load_table(write(text));
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families.begin()->first, "decode_gqa bf16");
  const auto curves = fit_all(load_hardware("h100"), families, [](const std::string&) {});
  ASSERT_EQ(curves.size(), 1u);
  for (const Surface& surface : curves.front().surfaces) {
    for (const Axis& axis : surface.axes) {
      EXPECT_GE(axis.step, 0.01);
      EXPECT_LE(axis.step, 64);
    }
  }
}

TEST_F(UserTable, ColumnsThatAreUnknownOrRepeatedAreRefused) {
  const std::string wrong = complaint("operation,compute,m,n,kk,seconds\ngemm,bf16,1,2,3,1\n");
  EXPECT_THAT(wrong, HasSubstr("column 'kk' is unknown; did you mean k"));
  EXPECT_THAT(complaint("operation,compute,m,n,k,second,comment\ngemm,bf16,1,2,3,1,x\n"),
              HasSubstr("column 'second' is unknown; did you mean seconds"));
  EXPECT_THAT(complaint("operation,compute,m,n,k,seconds,measured_by_whom\ngemm,bf16,1,2,3,1,x\n"),
              HasSubstr("column 'measured_by_whom' is unknown; known are operation, "));
  EXPECT_THAT(complaint("operation,compute,m,n,k,m,seconds\ngemm,bf16,1,2,3,4,1\n"),
              HasSubstr("column 'm' stands there twice"));
}

TEST_F(UserTable, AByteOrderMarkIsPassedOver) {
  const auto families = load_table(write("\xef\xbb\xbfoperation,compute,m,n,k,seconds\ngemm,bf16,1,2,3,1e-5\n"));
  EXPECT_EQ(families.begin()->second.samples.front().operation.m, 1);
}

TEST_F(UserTable, TimesThatTheDeviceContradictsAreDoubted) {
  const Hardware h200 = load_hardware("h200");  // 989 TFLOP/s in BF16, 4.8 TB/s
  const auto doubts = [&](const std::string& rows) {
    return doubtful_times(h200, load_table(write("operation,compute,m,n,k,devices,bytes,seconds\n" + rows)));
  };
  EXPECT_TRUE(doubts("gemm,bf16,8192,8192,8192,,,1.3e-3\ngemm,bf16,1,64,64,,,2e-5\n").empty());
  EXPECT_TRUE(doubts("gemm,bf16,8192,8192,8192,,,1e-3\n").empty()) << "1.11 times the peak";
  const auto quick = doubts("gemm,bf16,1,64,64,,,2e-5\ngemm,bf16,8192,8192,8192,,,1.1e-6\n");
  ASSERT_EQ(quick.size(), 1u);
  EXPECT_THAT(quick.front(),
              HasSubstr("1 row quicker than h200 allows, the first: row 2 (gemm bf16) takes 1.1 us, 1e+03 "
                        "times the peak arithmetic rate"));
  EXPECT_THAT(doubts("all_reduce,bf16,,,,8,1e9,1e-3\n").front(), HasSubstr("the bandwidth of its links"));
  const auto slow = doubts("gemm,bf16,8192,8192,8192,,,1300\ngemm,bf16,1,64,64,,,20\n");
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_THAT(slow.front(), HasSubstr("2 rows slower than a thousandth of what h200 does, the first: row 1"));
}

TEST(Fit, ABadFitIsDoubted) {
  Curve curve;
  curve.used = {.rows = 100, .mean = 0.05};
  curve.held_back = {.rows = 20, .mean = 0.29};
  EXPECT_TRUE(doubtful_fits({curve}).empty());
  curve.held_back.mean = 0.86;
  ASSERT_EQ(doubtful_fits({curve}).size(), 1u);
  EXPECT_THAT(doubtful_fits({curve}).front(), HasSubstr("gemm bf16 is 86 % off on average, above 30 %"));
}

TEST(Fit, TooFewRowsAreSaid) {
  SampleFamily family;
  for (int i = 0; i < 3; ++i)
    family.samples.push_back({{.kind = OperationKind::gemm, .m = 1, .n = 1, .k = 1 + i}, 1e-6});
  EXPECT_THROW(fit_curve(family, kRates), std::invalid_argument);
}

}  // namespace
}  // namespace isomer
