#include "plan/sensitivity.h"

#include <algorithm>
#include <limits>

#include "core/quantity_text.h"

namespace isomer {

namespace {

template <class Value>
double spread(const SensitivityRow& row, Value value) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const AssumedEnd& end : row.ends) {
    low = std::min(low, value(end.ratios));
    high = std::max(high, value(end.ratios));
  }
  return low > 0 ? high / low : 0;
}

LayoutRatios ratios_under(const SensitivityStudy& study, const Assumptions& assumptions,
                          const DecodePrecisions& precision) {
  DecodeProblem problem = study.problem;
  problem.precision = precision;
  const DecodeSearch search = search_decode(problem, with_assumptions(study.hardware, assumptions), study.options);
  return ratios_of(pareto_frontier(search, study.ours), pareto_frontier(search, study.theirs));
}

void widen(const LayoutRatios& ratios, Sensitivity& result) {
  result.lowest.interactivity = std::min(result.lowest.interactivity, ratios.interactivity);
  result.lowest.throughput = std::min(result.lowest.throughput, ratios.throughput);
  result.highest.interactivity = std::max(result.highest.interactivity, ratios.interactivity);
  result.highest.throughput = std::max(result.highest.throughput, ratios.throughput);
}

}  // namespace

LayoutRatios ratios_of(const std::vector<DecodePoint>& ours, const std::vector<DecodePoint>& theirs) {
  if (ours.empty() || theirs.empty()) return {};
  LayoutRatios ratios{.interactivity = theirs.front().step_s / ours.front().step_s};
  // Both frontiers rise with the limit in steps, so the ratio is largest where ours has just risen.
  const auto best_within = [](const std::vector<DecodePoint>& frontier, double step_s) {
    const auto end = std::upper_bound(frontier.begin(), frontier.end(), step_s,
                                      [](double limit, const DecodePoint& point) { return limit < point.step_s; });
    return end == frontier.begin() ? 0.0 : std::prev(end)->per_device();
  };
  const auto look_at = [&](double step_s) {
    const double below = best_within(theirs, step_s);
    if (below <= 0) return;  // no layout of theirs is so quick: the ratio has no meaning
    const double ratio = best_within(ours, step_s) / below;
    if (ratio > ratios.throughput) {
      ratios.throughput = ratio;
      ratios.at_step_s = step_s;
    }
  };
  look_at(theirs.front().step_s);
  for (const DecodePoint& point : ours) look_at(point.step_s);
  return ratios;
}

double SensitivityRow::spread_interactivity() const {
  return spread(*this, [](const LayoutRatios& r) { return r.interactivity; });
}
double SensitivityRow::spread_throughput() const {
  return spread(*this, [](const LayoutRatios& r) { return r.throughput; });
}

LinkRange link_range(const Assumptions& base) {
  LinkRange range;
  if (base.link_latency_s && *base.link_latency_s > 0) {
    range.least_latency_s = *base.link_latency_s / 3;
    range.most_latency_s = *base.link_latency_s * 3;
  }
  range.least_bandwidth *= base.link_bandwidth_factor;
  range.most_bandwidth *= base.link_bandwidth_factor;
  return range;
}

std::string times_text(double factor) { return fmt::format("{:.3g} times", factor); }

std::vector<SensitivityRow> assumption_ranges(const DecodeProblem& problem, const Assumptions& base) {
  std::vector<SensitivityRow> rows;
  const auto end = [&](std::string value, auto change) {
    AssumedEnd e{.value = std::move(value), .assumptions = base, .precision = problem.precision};
    change(e);
    return e;
  };
  const auto latency = [](double seconds) {
    return [seconds](AssumedEnd& e) { e.assumptions.link_latency_s = seconds; };
  };
  const auto bandwidth = [](double factor) {
    return [factor](AssumedEnd& e) { e.assumptions.link_bandwidth_factor = factor; };
  };
  const auto exchange = [](Precision precision) {
    return [precision](AssumedEnd& e) { e.assumptions.exchange_precision = precision; };
  };
  const auto contention = [](double factor) {
    return [factor](AssumedEnd& e) { e.assumptions.overlap_contention = factor; };
  };
  const auto cache = [](Precision precision) { return [precision](AssumedEnd& e) { e.precision.cache = precision; }; };
  const LinkRange links = link_range(base);
  rows.push_back({"link latency",
                  {end(format_seconds(links.least_latency_s), latency(links.least_latency_s)),
                   end(format_seconds(links.most_latency_s), latency(links.most_latency_s))}});
  rows.push_back({"link bandwidth",
                  {end(times_text(links.least_bandwidth), bandwidth(links.least_bandwidth)),
                   end(times_text(links.most_bandwidth), bandwidth(links.most_bandwidth))}});
  rows.push_back(
      {"exchange precision", {end("fp8", exchange(Precision::fp8)), end("bf16", exchange(Precision::bf16))}});
  rows.push_back({"FP4 efficiency",
                  {end(fmt::format("{:.3g} of its rate", 0.5 * base.fp4_efficiency),
                       [&](AssumedEnd& e) { e.assumptions.fp4_efficiency = 0.5 * base.fp4_efficiency; }),
                   end("its rate", [](AssumedEnd& e) { e.assumptions.fp4_efficiency = 1; })}});
  rows.push_back({"overlap contention", {end("none", contention(1)), end("2 (no gain)", contention(2))}});
  rows.push_back({"cache precision", {end("nvfp4", cache(Precision::nvfp4)), end("bf16", cache(Precision::bf16))}});
  const auto corner = [&](const char* value, double latency_s, double factor, Precision precision, double q) {
    return end(value, [=](AssumedEnd& e) {
      e.assumptions.link_latency_s = latency_s;
      e.assumptions.link_bandwidth_factor = factor;
      e.assumptions.exchange_precision = precision;
      e.assumptions.overlap_contention = q;
    });
  };
  rows.push_back({"all of the links",
                  {corner("best", links.least_latency_s, links.most_bandwidth, Precision::fp8, 1),
                   corner("worst", links.most_latency_s, links.least_bandwidth, Precision::bf16, 2)}});
  return rows;
}

Sensitivity study_sensitivity(const SensitivityStudy& study) {
  Sensitivity result;
  study.progress("sensitivity: as described");
  result.base = ratios_under(study, study.base, study.problem.precision);
  result.lowest = result.highest = result.base;
  result.rows = assumption_ranges(study.problem, study.base);
  for (SensitivityRow& row : result.rows) {
    for (AssumedEnd& end : row.ends) {
      study.progress(fmt::format("sensitivity: {} {}", row.assumption, end.value));
      end.ratios = ratios_under(study, end.assumptions, end.precision);
      widen(end.ratios, result);
    }
  }
  std::stable_sort(result.rows.begin(), result.rows.end(), [](const SensitivityRow& a, const SensitivityRow& b) {
    return std::max(a.spread_interactivity(), a.spread_throughput()) >
           std::max(b.spread_interactivity(), b.spread_throughput());
  });
  return result;
}

}  // namespace isomer
