#include "plan/fit.h"

#include <cmath>

#include "core/error.h"
#include "plan/fit_surfaces.h"
#include "plan/nelder_mead.h"

namespace isomer {

namespace {

constexpr std::size_t kSearchRows = 4000;  // enough for five coefficients

struct Row {
  const Operation* operation;
  OpCost cost;
  double log_seconds;
};

std::vector<Row> used_rows(const SampleFamily& family, std::size_t at_most) {
  std::vector<Row> rows;
  for (const TimedOperation& sample : family.samples) {
    if (!sample.held_back) rows.push_back({&sample.operation, cost_of(sample.operation), std::log(sample.seconds)});
  }
  if (rows.size() <= at_most) return rows;
  std::vector<Row> thinned;
  for (std::size_t i = 0; i < at_most; ++i) thinned.push_back(rows[i * rows.size() / at_most]);
  return thinned;
}

double huber(double residual) {
  const double size = std::fabs(residual);
  return size <= kHuberWidth ? size * size / 2 : kHuberWidth * (size - kHuberWidth / 2);
}

/// Squared excess beyond [low, high] of a logarithm: keeps coefficients where they mean something.
double excess(double value, double low, double high) {
  const double out = std::fmax(0, std::fmax(std::log(low) - value, value - std::log(high)));
  return out * out;
}

void assign(Curve& curve, const std::vector<double>& x) {
  curve.launch_s = std::exp(x[0]);
  curve.compute_share = std::exp(x[1]);
  curve.bytes_share = std::exp(x[2]);
  curve.exponent = std::exp(x[3]);
  if (x.size() > 4) curve.per_item_s = std::exp(x[4]);
}

double bounds_penalty(const std::vector<double>& x) {
  double sum = excess(x[0], 1e-7, 1e-2) + excess(x[1], 0.01, 1) + excess(x[2], 0.01, 1) + excess(x[3], 1, 12);
  if (x.size() > 4) sum += excess(x[4], 1e-13, 1e-4);
  return sum;
}

void fit_physical(Curve& curve, const std::vector<Row>& rows, Rates rates) {
  double fastest = rows.front().log_seconds;
  for (const Row& row : rows) fastest = std::min(fastest, row.log_seconds);
  std::vector<double> start = {fastest - 0.1, std::log(0.6), std::log(0.7), std::log(2.0)};
  double most_items = 0;
  for (const Row& row : rows) most_items = std::fmax(most_items, items_of(*row.operation));
  if (most_items > 0) start.push_back(fastest - std::log(most_items));
  const auto loss = [&](const std::vector<double>& x) {
    Curve trial = curve;
    assign(trial, x);
    double sum = 0;
    for (const Row& row : rows) {
      sum += huber(std::log(physical_seconds(trial, *row.operation, row.cost, rates)) - row.log_seconds);
    }
    return sum / static_cast<double>(rows.size()) + 0.1 * bounds_penalty(x);
  };
  assign(curve, nelder_mead(loss, nelder_mead(loss, start, 0.5, 400), 0.2, 400));
}

}  // namespace

Rates rates_of(const Hardware& hardware, const Curve& curve) {
  if (is_collective(curve.kind)) return {1, hardware.tier_for(2).bandwidth_bytes_per_s};
  return {hardware.peak_flops_per_s(hardware.compute_precision(curve.compute)), hardware.memory_bandwidth_bytes_per_s};
}

double predicted_seconds(const Curve& curve, const Operation& operation, Rates rates) {
  const OpCost cost = cost_of(operation);
  return physical_seconds(curve, operation, cost, rates) * surface_factor(curve, features_of(operation, cost));
}

std::vector<double> relative_errors(const Curve& curve, const SampleFamily& family, Rates rates, bool held_back) {
  std::vector<double> errors;
  for (const TimedOperation& sample : family.samples) {
    if (sample.held_back != held_back) continue;
    errors.push_back(std::fabs(predicted_seconds(curve, sample.operation, rates) / sample.seconds - 1));
  }
  return errors;
}

Curve fit_curve(const SampleFamily& family, Rates rates) {
  Curve curve = family.curve;
  const std::vector<Row> rows = used_rows(family, kSearchRows);
  if (rows.size() < kFewestRows) {
    invalid_argument("fit of {}: {} rows to fit to; at least {} are needed (a fifth is held back)", curve.label(),
                     rows.size(), kFewestRows);
  }
  if (is_collective(curve.kind)) {
    for (const TimedOperation& sample : family.samples) {
      curve.max_devices = std::max(curve.max_devices, sample.operation.devices);
    }
  }
  fit_physical(curve, rows, rates);
  fit_surfaces(curve, family, rates);
  curve.used = summarise(relative_errors(curve, family, rates, false));
  curve.held_back = summarise(relative_errors(curve, family, rates, true));
  return curve;
}

}  // namespace isomer
