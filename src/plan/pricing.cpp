// How long an operation takes: the curve that applies, or the roofline alone.
#include <algorithm>
#include <cmath>

#include "plan/curves.h"
#include "plan/hardware.h"

namespace isomer {

namespace {

/// Messages that wait for one another: an all-reduce is a reduce-scatter and an all-gather (as core/virtual_clock.h).
int rounds_of(OperationKind kind) { return kind == OperationKind::all_reduce ? 2 : 1; }

bool without_work(const Operation& op, const OpCost& cost) {
  if (op.count <= 0) return true;
  if (is_collective(op.kind)) return op.devices <= 1 || cost.bytes_written <= 0;
  if (op.kind == OperationKind::elementwise) return op.bytes <= 0;
  return cost.flops <= 0;  // weights that nothing is multiplied with are not read
}

double compute_rate(const Hardware& hardware, Precision compute) {
  const double rate = hardware.peak_flops_per_s(compute);
  return compute == Precision::nvfp4 ? rate * hardware.fp4_efficiency : rate;
}

double roofline_seconds(const Hardware& hardware, const Operation& op, const OpCost& cost, Precision compute) {
  if (is_collective(op.kind)) {
    const LinkTier& tier = hardware.tier_for(op.reach());
    return rounds_of(op.kind) * tier.latency_s + cost.bytes_written / tier.bandwidth_bytes_per_s;
  }
  return std::max(cost.flops / compute_rate(hardware, compute),
                  (cost.bytes_read + cost.bytes_written) / hardware.memory_bandwidth_bytes_per_s);
}

bool covers(const Curve& curve, const Operation& op) {
  return curve.max_devices == 0 || op.devices <= curve.max_devices;
}

/// The fastest of the alternatives; those measured for so many devices first.
double fastest(const CurveSet::Alternatives& choice, const Operation& op, const OpCost& cost, Rates rates) {
  const Features features = features_of(op, cost);
  double best = 0;
  bool best_covers = false;
  for (int i = 0; i < choice.count; ++i) {
    const Curve& curve = *choice.curves[static_cast<std::size_t>(i)];
    const bool covered = covers(curve, op);
    if (best_covers && !covered) continue;
    const double seconds = physical_seconds(curve, op, cost, rates) * surface_factor(curve, features);
    if (i == 0 || seconds < best || covered != best_covers) best = seconds;
    best_covers = covered;
  }
  return best;
}

double collective_seconds(const Hardware& hardware, const Operation& op, const OpCost& cost) {
  const LinkTier& tier = hardware.tier_for(op.reach());
  const auto& choice = hardware.curves->find(op.kind, op.compute, op.storage, hardware.expert_load);
  const int rounds = rounds_of(op.kind);
  // Curves describe the first tier; beyond it, and where nothing was measured, the tier's own latency stands.
  const bool measured = choice.exact && &tier == hardware.tiers.data();
  if (!measured) {
    constexpr double kShare = 0.8;
    return rounds * tier.latency_s + cost.bytes_written / (tier.bandwidth_bytes_per_s * kShare);
  }
  const double seconds = fastest(choice, op, cost, {1, tier.bandwidth_bytes_per_s});
  if (!hardware.assumed_link_latency_s) return seconds;
  double launch = launch_seconds(*choice.curves[0], op);
  for (int i = 1; i < choice.count; ++i) {
    launch = std::min(launch, launch_seconds(*choice.curves[static_cast<std::size_t>(i)], op));
  }
  const double assumed = rounds * *hardware.assumed_link_latency_s;
  return assumed + std::max(seconds - launch, 0.0);
}

}  // namespace

double seconds_of(const Hardware& hardware, const Operation& op) {
  const OpCost cost = cost_of(op);
  if (without_work(op, cost)) return 0;
  const auto count = static_cast<double>(op.count);
  const Precision compute = hardware.compute_precision(op.compute);
  if (hardware.roofline && is_collective(op.kind)) return count * roofline_seconds(hardware, op, cost, compute);
  if (is_collective(op.kind)) return count * collective_seconds(hardware, op, cost);
  const double kernels = count / hardware.kernel_efficiency;
  if (hardware.roofline) return kernels * roofline_seconds(hardware, op, cost, compute);
  const auto& choice = hardware.curves->find(op.kind, compute, op.storage, hardware.expert_load);
  return kernels * fastest(choice, op, cost, {compute_rate(hardware, compute), hardware.memory_bandwidth_bytes_per_s});
}

}  // namespace isomer
