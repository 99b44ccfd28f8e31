#include "plan/curves.h"

#include <cmath>

#include "core/error.h"

namespace isomer {

namespace {

double log2_of(std::int64_t value) { return value > 1 ? std::log2(static_cast<double>(value)) : 0.0; }
double log2_of(double value) { return value > 1 ? std::log2(value) : 0.0; }

bool is_decode(OperationKind kind) { return kind == OperationKind::decode_mla || kind == OperationKind::decode_gqa; }
bool is_prefill(OperationKind kind) { return kind == OperationKind::prefill_mla || kind == OperationKind::prefill_gqa; }

Features decode_features(const Operation& op) {
  const double batch = log2_of(op.batch), context = log2_of(op.context), heads = log2_of(op.heads);
  const double kv_heads = log2_of(op.kv_heads);
  return {batch, context, heads, kv_heads, std::fmax(0, heads - kv_heads), batch + context + kv_heads};
}

double power_mean(double a, double b, double exponent) {
  const double large = std::fmax(a, b), small = std::fmin(a, b);
  if (large <= 0) return 0;
  const double ratio = small / large;
  return ratio <= 0 ? large : large * std::pow(1 + std::pow(ratio, exponent), 1 / exponent);
}

}  // namespace

std::array<std::string_view, kMaxFeatures> feature_names(OperationKind kind) {
  if (is_decode(kind))
    return {"log2_batch", "log2_context", "log2_heads", "log2_kv_heads", "log2_group", "log2_cache_rows"};
  if (is_prefill(kind)) return {"log2_batch", "log2_context", "log2_heads"};
  if (is_collective(kind)) return {"log2_sent_bytes", "log2_devices"};
  if (kind == OperationKind::gemm) return {"log2_m", "log2_n", "log2_k"};
  if (kind == OperationKind::mla_bmm) return {"log2_m", "log2_heads", "log2_k_over_n"};
  if (kind == OperationKind::moe) return {"log2_tokens", "log2_inter_per_device", "log2_local_experts"};
  return {"log2_bytes"};
}

Features features_of(const Operation& op, const OpCost& cost) {
  if (is_decode(op.kind)) return decode_features(op);
  if (is_prefill(op.kind)) return {log2_of(op.batch), log2_of(op.context), log2_of(op.heads)};
  if (is_collective(op.kind)) return {log2_of(cost.bytes_written), log2_of(std::int64_t{op.devices})};
  if (op.kind == OperationKind::gemm) return {log2_of(op.m), log2_of(op.n), log2_of(op.k)};
  if (op.kind == OperationKind::mla_bmm) return {log2_of(op.m), log2_of(op.heads), log2_of(op.k) - log2_of(op.n) + 16};
  if (op.kind == OperationKind::moe) {
    return {log2_of(op.m), log2_of(static_cast<double>(op.n) / static_cast<double>(op.moe_tp)),
            log2_of(static_cast<double>(op.experts) / static_cast<double>(op.moe_ep))};
  }
  return {log2_of(op.bytes)};
}

int num_values(const std::vector<Axis>& axes) {
  int count = 1;
  for (const Axis& axis : axes) count *= axis.count;
  return count;
}

Corners corners_of(const std::vector<Axis>& axes, const Features& features) {
  Corners corners;
  corners.count = 1;
  corners.weight[0] = 1;
  for (const Axis& axis : axes) {
    const double last = axis.count - 1;
    const double place =
        std::clamp((features[static_cast<std::size_t>(axis.feature)] - axis.first) / axis.step, 0.0, last);
    const int low = std::min(static_cast<int>(place), std::max(axis.count - 2, 0));
    const double share = place - low;
    const int before = corners.count;
    for (int i = 0; i < before; ++i) {
      const auto at = static_cast<std::size_t>(i), beside = static_cast<std::size_t>(before + i);
      const int base = corners.index[at] * axis.count + low;
      corners.index[at] = base;
      if (share > 0) {
        corners.index[beside] = base + 1;
        corners.weight[beside] = corners.weight[at] * share;
        corners.weight[at] *= 1 - share;
      }
    }
    if (share > 0) corners.count = 2 * before;
  }
  return corners;
}

std::string_view name_of(ExpertLoad load) {
  static constexpr std::string_view kNames[] = {"balanced", "power_law_1.01", "power_law_1.2"};
  return kNames[static_cast<std::size_t>(load)];
}

std::string Curve::label() const {
  std::string text = fmt::format("{} {}", name_of(kind), name_of(compute));
  if (storage != compute) text += fmt::format("/{}", name_of(storage));
  if (!variant.empty()) text += " " + variant;
  if (kind == OperationKind::moe) text += fmt::format(" {}", name_of(load));
  return text;
}

double items_of(const Operation& op) {
  if (is_collective(op.kind)) return std::fmax(0, log2_of(std::int64_t{op.devices}) - 1);
  if (op.kind == OperationKind::moe) return static_cast<double>(op.m);
  if (op.kind == OperationKind::decode_mla) return static_cast<double>(op.batch);
  if (op.kind == OperationKind::decode_gqa) return static_cast<double>(op.batch * op.heads);
  if (is_prefill(op.kind)) return static_cast<double>(op.batch * op.heads);
  return 0;
}

double launch_seconds(const Curve& curve, const Operation& op) {
  return curve.launch_s + (curve.per_item_s > 0 ? curve.per_item_s * items_of(op) : 0.0);
}

double physical_seconds(const Curve& curve, const Operation& op, const OpCost& cost, Rates rates) {
  const double bytes = is_collective(op.kind) ? cost.bytes_written : cost.bytes_read + cost.bytes_written;
  return launch_seconds(curve, op) + power_mean(cost.flops / (rates.flops_per_s * curve.compute_share),
                                                bytes / (rates.bytes_per_s * curve.bytes_share), curve.exponent);
}

double surface_factor(const Curve& curve, const Features& features) {
  double sum = 0;
  for (const Surface& surface : curve.surfaces) {
    const Corners corners = corners_of(surface.axes, features);
    for (int i = 0; i < corners.count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      sum += corners.weight[at] * surface.values[static_cast<std::size_t>(corners.index[at])];
    }
  }
  return sum == 0 ? 1.0 : std::exp(sum);
}

}  // namespace isomer
