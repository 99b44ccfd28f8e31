#include "plan/fit_surfaces.h"

#include <Eigen/Cholesky>
#include <cmath>

#include "core/error.h"
#include "plan/fit.h"

namespace isomer {

namespace {

constexpr int kRounds = 12;          // of reweighting
constexpr double kSmoothness = 0.1;  // weight of (difference of neighbouring knots)², in rows
constexpr double kShrinkage = 0.02;  // weight of knot², in rows

struct Equation {
  std::vector<int> index;
  std::vector<double> weight;
  double target = 0;
};

std::vector<Equation> equations(const Curve& curve, const SampleFamily& family, Rates rates) {
  std::vector<Equation> rows;
  for (const TimedOperation& sample : family.samples) {
    if (sample.held_back) continue;
    const OpCost cost = cost_of(sample.operation);
    const Features features = features_of(sample.operation, cost);
    Equation row;
    row.target = std::log(sample.seconds / physical_seconds(curve, sample.operation, cost, rates));
    int first = 0;
    for (const Surface& surface : curve.surfaces) {
      const Corners corners = corners_of(surface.axes, features);
      for (int i = 0; i < corners.count; ++i) {
        row.index.push_back(first + corners.index[static_cast<std::size_t>(i)]);
        row.weight.push_back(corners.weight[static_cast<std::size_t>(i)]);
      }
      first += num_values(surface.axes);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Smoothness and shrinkage of all knots, on the lower triangle.
Eigen::MatrixXd penalties(const std::vector<Surface>& surfaces, int unknowns) {
  Eigen::MatrixXd matrix = Eigen::MatrixXd::Zero(unknowns, unknowns);
  matrix.diagonal().setConstant(kShrinkage);
  int first = 0;
  for (const Surface& surface : surfaces) {
    const int size = num_values(surface.axes);
    int stride = size;
    for (const Axis& axis : surface.axes) {
      stride /= axis.count;
      for (int i = 0; i < size; ++i) {
        if (i / stride % axis.count + 1 >= axis.count) continue;
        const int low = first + i, high = low + stride;
        matrix(low, low) += kSmoothness;
        matrix(high, high) += kSmoothness;
        matrix(high, low) -= kSmoothness;
      }
    }
    first += size;
  }
  return matrix;
}

double residual_of(const Equation& row, const Eigen::VectorXd& values) {
  double sum = -row.target;
  for (std::size_t i = 0; i < row.index.size(); ++i) sum += row.weight[i] * values[row.index[i]];
  return sum;
}

Eigen::VectorXd solve(const std::vector<Equation>& rows, const Eigen::MatrixXd& penalty) {
  const auto unknowns = penalty.rows();
  Eigen::VectorXd values = Eigen::VectorXd::Zero(unknowns);
  for (int round = 0; round < kRounds; ++round) {
    Eigen::MatrixXd matrix = penalty;
    Eigen::VectorXd right = Eigen::VectorXd::Zero(unknowns);
    for (const Equation& row : rows) {
      const double off = round == 0 ? 0 : std::fabs(residual_of(row, values));
      const double trust = off <= kHuberWidth ? 1 : kHuberWidth / off;
      for (std::size_t i = 0; i < row.index.size(); ++i) {
        right[row.index[i]] += trust * row.weight[i] * row.target;
        for (std::size_t j = 0; j <= i; ++j) {
          const int a = std::max(row.index[i], row.index[j]), b = std::min(row.index[i], row.index[j]);
          matrix(a, b) += trust * row.weight[i] * row.weight[j];
        }
      }
    }
    values = matrix.selfadjointView<Eigen::Lower>().ldlt().solve(right);
  }
  return values;
}

}  // namespace

ErrorSummary summarise(std::vector<double> errors) {
  ErrorSummary summary{.rows = static_cast<std::int64_t>(errors.size())};
  if (errors.empty()) return summary;
  for (const double error : errors) summary.mean += error / static_cast<double>(errors.size());
  // Nearest rank: the smallest error that 95 % of the rows do not exceed.
  const auto place = static_cast<std::size_t>(std::ceil(0.95 * static_cast<double>(errors.size()))) - 1;
  std::nth_element(errors.begin(), errors.begin() + static_cast<std::ptrdiff_t>(place), errors.end());
  summary.p95 = errors[place];
  return summary;
}

void fit_surfaces(Curve& curve, const SampleFamily& family, Rates rates) {
  curve.surfaces = surfaces_for(family);
  if (curve.surfaces.empty()) return;
  int unknowns = 0;
  for (const Surface& surface : curve.surfaces) unknowns += num_values(surface.axes);
  const Eigen::VectorXd values = solve(equations(curve, family, rates), penalties(curve.surfaces, unknowns));
  Eigen::Index next = 0;
  for (Surface& surface : curve.surfaces) {
    const auto size = static_cast<std::size_t>(num_values(surface.axes));
    surface.values.assign(size, 0);
    for (double& value : surface.values) value = values[next++];
  }
}

}  // namespace isomer
