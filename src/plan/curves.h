// Efficiency curves: how far from the roofline one family of operations stays on one device, by its size.
//
//     t = (launch + items·per_item + ((F/(peak·compute_share))^p + (B/(rate·bytes_share))^p)^(1/p))
//         · exp(sum of surfaces)
//
// Items are tokens of a moe, queries of an attention, doublings of the devices beyond 2 of a collective.
// F and B are cost_of's; `rate` is the memory's bandwidth, or the link's for a collective. A surface is piecewise
// multilinear in up to three logarithms of the shape, constant beyond its knots. `plan fit` finds both.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/hardware.h"
#include "plan/operation.h"

namespace isomer {

inline constexpr int kMaxFeatures = 6;
using Features = std::array<double, kMaxFeatures>;

/// Names of a kind's features, as hardware files write them; unused ones are empty.
std::array<std::string_view, kMaxFeatures> feature_names(OperationKind kind);
/// Their values: base-2 logarithms of the shape's numbers, at least 0.
Features features_of(const Operation& operation, const OpCost& cost);

/// Knots at first, first + step, … (`count` of them) along one feature.
struct Axis {
  int feature = 0;
  double first = 0, step = 1;
  int count = 1;
};

struct Surface {
  std::vector<Axis> axes;      // 1 to 3
  std::vector<double> values;  // row-major over the axes' knots; natural logarithms of time ratios
};

/// Corners of the cell that holds a point, and their weights (which sum to 1).
struct Corners {
  std::array<int, 8> index{};
  std::array<double, 8> weight{};
  int count = 0;
};
Corners corners_of(const std::vector<Axis>& axes, const Features& features);
int num_values(const std::vector<Axis>& axes);

/// Mean and 95th percentile of |predicted/measured − 1|.
struct ErrorSummary {
  std::int64_t rows = 0;
  double mean = 0, p95 = 0;
};

struct Curve {
  OperationKind kind = OperationKind::gemm;
  Precision compute = Precision::bf16, storage = Precision::bf16;
  std::string variant;                     // kernel or library, where there are several: "nccl"
  ExpertLoad load = ExpertLoad::balanced;  // moe
  bool priced = true;                      // false: fitted and validated, and not what the planner uses
  double launch_s = 3e-6;
  double per_item_s = 0;  // see items_of
  double compute_share = 0.7, bytes_share = 0.8;
  double exponent = 4;
  std::vector<Surface> surfaces;
  int max_devices = 0;           // collectives: the most devices measured; 0: no such limit
  ErrorSummary used, held_back;  // rows 0: not fitted

  /// "moe nvfp4/nvfp4 cutlass balanced".
  std::string label() const;
};

/// What costs time beside FLOPs and bytes: tokens of a moe (sorted and gathered even where their experts are
/// elsewhere), queries of an attention, doublings of the devices beyond 2 of a collective; 0 for the rest.
double items_of(const Operation& operation);

/// Peak rates that a curve is relative to.
struct Rates {
  double flops_per_s = 1, bytes_per_s = 1;
};
/// Without the surfaces. `parts`, if given, receives the launch time that is in it.
double physical_seconds(const Curve& curve, const Operation& operation, const OpCost& cost, Rates rates);
double launch_seconds(const Curve& curve, const Operation& operation);
/// exp(sum of surfaces).
double surface_factor(const Curve& curve, const Features& features);

/// All curves of a device, resolved: for each kind, computed and stored precision and load the ones that apply, of
/// which the fastest is taken (libraries pick their kernels so). Where a combination has none, the nearest stands in.
class CurveSet {
 public:
  static constexpr int kMaxAlternatives = 4;
  struct Alternatives {
    std::array<const Curve*, kMaxAlternatives> curves{};
    int count = 0;
    bool exact = false;  // false: another precision's or kind's curve stands in
  };

  /// Throws std::invalid_argument if two priced curves are the same in everything, or too many apply to one operation.
  explicit CurveSet(std::vector<Curve> curves);
  CurveSet(const CurveSet&) = delete;
  CurveSet& operator=(const CurveSet&) = delete;

  const Alternatives& find(OperationKind kind, Precision compute, Precision storage, ExpertLoad load) const;
  const std::vector<Curve>& all() const { return curves_; }

 private:
  Alternatives resolve(OperationKind kind, Precision compute, Precision storage, ExpertLoad load) const;
  std::vector<Curve> curves_;
  std::vector<Curve> defaults_;  // one a kind, unfitted
  std::vector<Alternatives> table_;
};

}  // namespace isomer
