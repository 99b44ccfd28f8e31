#include "plan/fit_report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "plan/curves.h"
#include "plan/fit.h"
#include "plan/fit_surfaces.h"

namespace isomer {

namespace {

const Curve* find_curve(const Hardware& hardware, const std::string& label) {
  for (const Curve& curve : hardware.curves->all()) {
    if (curve.label() == label) return &curve;
  }
  return nullptr;
}

/// What prices are wanted beyond: the context of a decode, the devices of a collective; 0 for the rest.
std::int64_t reach_of(const Operation& o) {
  if (is_collective(o.kind)) return o.devices;
  return o.kind == OperationKind::decode_mla || o.kind == OperationKind::decode_gqa ? o.context : 0;
}

std::string shape_of(const Operation& o) {
  if (is_collective(o.kind)) return fmt::format("{:.0f} bytes on {} devices", o.bytes, o.devices);
  if (o.kind == OperationKind::moe) return fmt::format("{} tokens, TP {} × EP {}", o.m, o.moe_tp, o.moe_ep);
  if (o.kind == OperationKind::gemm) return fmt::format("m {}, n {}, k {}", o.m, o.n, o.k);
  if (o.kind == OperationKind::mla_bmm) return fmt::format("{} tokens, {} heads, {} → {}", o.m, o.heads, o.k, o.n);
  const std::string kv = o.kv_heads > 0 ? fmt::format(" on {} KV heads", o.kv_heads) : "";
  return fmt::format("batch {}, {} heads{}, context {}", o.batch, o.heads, kv, o.context);
}

std::vector<Miss> worst_of(const Curve& curve, const SampleFamily& family, Rates rates, std::size_t count) {
  std::vector<Miss> misses;
  for (const TimedOperation& sample : family.samples) {
    if (!sample.held_back) continue;
    misses.push_back({predicted_seconds(curve, sample.operation, rates) / sample.seconds, sample.seconds,
                      sample.held_back, shape_of(sample.operation)});
  }
  std::stable_sort(misses.begin(), misses.end(), [](const Miss& a, const Miss& b) {
    return std::fabs(std::log(a.ratio)) > std::fabs(std::log(b.ratio));
  });
  misses.resize(std::min(misses.size(), count));
  return misses;
}

}  // namespace

std::vector<Curve> fit_all(const Hardware& hardware, const SampleFamilies& families,
                           const std::function<void(const std::string&)>& progress, std::vector<std::string>* skipped) {
  std::vector<Curve> curves;
  for (const auto& [label, family] : families) {
    const auto used = std::count_if(family.samples.begin(), family.samples.end(),
                                    [](const TimedOperation& sample) { return !sample.held_back; });
    if (used < kFewestRows) {
      if (skipped != nullptr) skipped->push_back(label);
      continue;
    }
    progress(label);
    curves.push_back(fit_curve(family, rates_of(hardware, family.curve)));
  }
  return curves;
}

nlohmann::json fit_json(const std::string& data) {
  return {{"data", data},
          {"method",
           "launch time, shares of peak and exponent by Nelder-Mead, then surfaces over the logarithms of the shape by "
           "penalised least squares; both on ln(predicted/measured)"},
          {"outliers", fmt::format("kept, in the fit and in the errors; beyond {:.0f} % off a row counts by its "
                                   "distance, not its square (Huber)",
                                   100 * kHuberWidth)},
          {"held_back", "a fifth of the shapes, by an FNV-1a hash of family and shape; no part in the fit"}};
}

std::vector<Validation> validate(const Hardware& hardware, const SampleFamilies& families, std::size_t num_worst,
                                 std::vector<std::string>* without_curve) {
  std::vector<Validation> result;
  for (const auto& [label, family] : families) {
    const Curve* curve = find_curve(hardware, label);
    if (curve == nullptr) {
      if (without_curve != nullptr) without_curve->push_back(label);
      continue;
    }
    const Rates rates = rates_of(hardware, *curve);
    Validation v{.label = label, .kind = curve->kind, .priced = curve->priced};
    v.used_errors = relative_errors(*curve, family, rates, false);
    v.held_back_errors = relative_errors(*curve, family, rates, true);
    v.used = summarise(v.used_errors);
    v.held_back = summarise(v.held_back_errors);
    v.worst = worst_of(*curve, family, rates, num_worst);
    result.push_back(std::move(v));
  }
  return result;
}

std::vector<Validation> extrapolate(const Hardware& hardware, const SampleFamilies& families) {
  std::vector<Validation> result;
  for (const auto& [label, family] : families) {
    std::int64_t largest = 0;
    for (const TimedOperation& sample : family.samples) largest = std::max(largest, reach_of(sample.operation));
    const std::int64_t limit = largest / (is_collective(family.curve.kind) ? 2 : 4);
    SampleFamily split = family;
    for (TimedOperation& sample : split.samples) sample.held_back = reach_of(sample.operation) > limit;
    const auto used = std::count_if(split.samples.begin(), split.samples.end(),
                                    [](const TimedOperation& sample) { return !sample.held_back; });
    if (largest == 0 || used < kFewestRows) continue;
    const Rates rates = rates_of(hardware, family.curve);
    const Curve curve = fit_curve(split, rates);
    result.push_back({.label = label,
                      .kind = curve.kind,
                      .priced = curve.priced,
                      .used_errors = relative_errors(curve, split, rates, false),
                      .held_back_errors = relative_errors(curve, split, rates, true),
                      .used = curve.used,
                      .held_back = curve.held_back});
  }
  return result;
}

Validation pooled(const std::string& label, const std::vector<const Validation*>& parts) {
  Validation sum{.label = label, .kind = parts.front()->kind};
  for (const Validation* part : parts) {
    sum.used_errors.insert(sum.used_errors.end(), part->used_errors.begin(), part->used_errors.end());
    sum.held_back_errors.insert(sum.held_back_errors.end(), part->held_back_errors.begin(),
                                part->held_back_errors.end());
  }
  sum.used = summarise(sum.used_errors);
  sum.held_back = summarise(sum.held_back_errors);
  return sum;
}

double aimed_error(OperationKind kind) {
  if (kind == OperationKind::gemm || kind == OperationKind::decode_mla || kind == OperationKind::decode_gqa)
    return 0.10;
  if (kind == OperationKind::moe || is_collective(kind)) return 0.15;
  return 0;
}

}  // namespace isomer
