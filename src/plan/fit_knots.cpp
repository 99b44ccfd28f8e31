// How fine the surfaces of each kind of operation are.
#include <cmath>

#include "plan/fit_surfaces.h"

namespace isomer {

namespace {

struct AxisPlan {
  int feature;
  double step;  // in doublings
};
using SurfacePlan = std::vector<AxisPlan>;

std::vector<SurfacePlan> plan_for(OperationKind kind) {
  switch (kind) {
    case OperationKind::gemm: return {{{0, 1}, {1, 2}, {2, 2}}};
    case OperationKind::moe: return {{{0, 2}, {1, 2}, {2, 2}}};
    case OperationKind::decode_mla: return {{{5, 1}, {2, 1}}, {{0, 2}, {1, 3}}};
    case OperationKind::decode_gqa: return {{{5, 2}, {4, 0.5}}, {{0, 2}, {1, 3}, {4, 1}}, {{0, 2}, {1, 2}, {3, 2}}};
    case OperationKind::prefill_mla:
    case OperationKind::prefill_gqa: return {{{0, 2}, {1, 2}, {2, 2}}};
    case OperationKind::mla_bmm: return {{{0, 2}, {1, 2}}, {{2, 2}}};
    case OperationKind::elementwise: return {{{0, 2}}};
    default: return {{{0, 2}, {1, 1}}};
  }
}

/// Knots from the smallest to the largest value, `step` apart or a little closer.
Axis axis_over(const SampleFamily& family, const AxisPlan& plan) {
  double low = INFINITY, high = -INFINITY;
  for (const TimedOperation& sample : family.samples) {
    const double value =
        features_of(sample.operation, cost_of(sample.operation))[static_cast<std::size_t>(plan.feature)];
    low = std::fmin(low, value);
    high = std::fmax(high, value);
  }
  // Logarithms of one shape differ by rounding.
  constexpr double kOneValue = 0.01;
  const int intervals = high - low > kOneValue ? static_cast<int>(std::ceil((high - low) / plan.step - 1e-9)) : 0;
  return {.feature = plan.feature,
          .first = low,
          .step = intervals > 0 ? (high - low) / intervals : 1.0,
          .count = intervals + 1};
}

std::vector<Surface> surfaces_with(const SampleFamily& family, double coarser) {
  std::vector<Surface> surfaces;
  for (const SurfacePlan& plan : plan_for(family.curve.kind)) {
    Surface surface;
    for (AxisPlan axis : plan) {
      axis.step *= coarser;
      surface.axes.push_back(axis_over(family, axis));
    }
    surfaces.push_back(std::move(surface));
  }
  return surfaces;
}

int total_values(const std::vector<Surface>& surfaces) {
  int total = 0;
  for (const Surface& surface : surfaces) total += num_values(surface.axes);
  return total;
}

}  // namespace

std::vector<Surface> surfaces_for(const SampleFamily& family) {
  // A knot for every two rows at most: steps grow until that holds.
  const auto most = static_cast<int>(family.samples.size() / 2);
  double coarser = 1;
  std::vector<Surface> surfaces = surfaces_with(family, coarser);
  while (total_values(surfaces) > most && coarser < 64) surfaces = surfaces_with(family, coarser *= 1.25);
  return surfaces;
}

}  // namespace isomer
