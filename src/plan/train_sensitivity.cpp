#include "plan/train_sensitivity.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/quantity_text.h"
#include "plan/sensitivity.h"
#include "plan/train_pricer.h"

namespace isomer {

namespace {

constexpr const char* kAllOfTheLinks = "all of the links";

/// Largest over smallest, of both ends of a range.
template <class Value>
double spread(const TrainRange& row, Value value) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const TrainEnd& end : row.ends) {
    low = std::min(low, value(end));
    high = std::max(high, value(end));
  }
  return low > 0 ? high / low : 0;
}

/// An end of a range with its hardware, and what is priced there as it is under the base.
struct PricedEnd {
  PricedEnd(const TrainStudy& study, TrainEnd& of)
      : end(&of), hardware(with_assumptions(study.hardware, of.assumptions)) {
    const Assumptions &a = study.base, &b = of.assumptions;
    const bool same_way = a.roofline == b.roofline;
    same_links = same_way && a.link_latency_s == b.link_latency_s && a.link_bandwidth_factor == b.link_bandwidth_factor;
    same_kernels = same_way && a.kernel_efficiency == b.kernel_efficiency && a.fp4_efficiency == b.fp4_efficiency;
    same_experts = a.expert_load == b.expert_load;
    same_backward = a.backward_efficiency == b.backward_efficiency;
  }
  bool prices_like_base(const TrainSpending& s) const {
    if (is_collective(s.operation.kind)) return same_links;
    if (s.operation.kind == OperationKind::moe && !same_experts) return false;
    return same_kernels && (same_backward || !s.attention_backward);
  }

  TrainEnd* end;
  Hardware hardware;
  bool same_links, same_kernels, same_experts, same_backward;
};

/// The quickest layout of each family at every end. A step is taken apart once, and what an end doesn't move is priced
/// once.
void price(const TrainStudy& study, const std::vector<TrainEnd*>& ends) {
  const Hardware base = with_assumptions(study.hardware, study.base);
  std::vector<PricedEnd> priced;
  for (TrainEnd* end : ends) priced.emplace_back(study, *end);
  std::vector<double> described, seconds;
  constexpr std::size_t kTold = 2000;
  for (std::size_t i = 0; i < study.search.points.size(); ++i) {
    if (i % kTold == 0) study.progress(fmt::format("sensitivity: {} of {}", i, study.search.points.size()));
    const TrainLayout& layout = study.search.layout_of(study.search.points[i]);
    const TrainWork work = train_work(study.problem, layout);
    described.clear();
    for (const auto* part : {&work.sequences, &work.once}) {
      for (const TrainSpending& s : *part) described.push_back(seconds_of(base, s));
    }
    const std::string family = family_of(layout);
    for (const PricedEnd& at : priced) {
      seconds = described;
      std::size_t next = 0;
      for (const auto* part : {&work.sequences, &work.once}) {
        for (const TrainSpending& s : *part) {
          if (!at.prices_like_base(s)) seconds[next] = seconds_of(at.hardware, s);
          ++next;
        }
      }
      const double step_s = time_of(work, seconds, at.hardware.link_overlap).total();
      const auto [best, first] = at.end->step_s.try_emplace(family, step_s);
      if (!first) best->second = std::min(best->second, step_s);
    }
  }
}

bool is_baseline_family(const std::string& family) {
  TrainLayout layout{.scheme = family, .sp = family == "without SP" ? 1 : 2};
  return is_train_baseline(layout);
}

double best_of(const TrainEnd& end, bool baselines) {
  double best = std::numeric_limits<double>::infinity();
  for (const auto& [family, step_s] : end.step_s) {
    if (is_baseline_family(family) == baselines) best = std::min(best, step_s);
  }
  return best;
}

std::string family_of_best(const TrainEnd& end, bool baselines) {
  const double best = best_of(end, baselines);
  for (const auto& [family, step_s] : end.step_s) {
    if (step_s == best && is_baseline_family(family) == baselines) return family;
  }
  return "";
}

void take_intervals(TrainSensitivity& result) {
  const auto interval = [&](auto value) {
    const double base = value(result.described);
    Interval found{base, base, base};
    for (const TrainRange& row : result.rows) {
      for (const TrainEnd& end : row.ends) found.widen(value(end));
    }
    return found;
  };
  result.step_s = interval([](const TrainEnd& end) { return end.quickest_s(); });
  if (!result.ours.empty()) result.ratio = interval([&](const TrainEnd& end) { return result.ratio_at(end); });
  for (const auto& item : result.described.step_s) {
    const std::string& family = item.first;
    result.behind.push_back(
        {family, interval([&](const TrainEnd& end) { return end.step_s.at(family) / end.quickest_s(); })});
  }
  std::stable_sort(result.behind.begin(), result.behind.end(),
                   [](const TrainBehind& a, const TrainBehind& b) { return a.times.base < b.times.base; });
}

}  // namespace

void Interval::widen(double value) {
  lowest = std::min(lowest, value);
  highest = std::max(highest, value);
}

double TrainEnd::quickest_s() const {
  double best = std::numeric_limits<double>::infinity();
  for (const auto& item : step_s) best = std::min(best, item.second);
  return best;
}

double TrainSensitivity::ratio_at(const TrainEnd& end) const {
  return ours.empty() ? 0 : best_of(end, true) / best_of(end, false);
}

std::vector<TrainRange> train_ranges(const TrainProblem& problem, const Assumptions& base) {
  std::vector<TrainRange> rows;
  const auto end = [&](std::string value, auto change) {
    TrainEnd e{.value = std::move(value), .assumptions = base};
    change(e.assumptions);
    return e;
  };
  const auto row = [&](const char* assumption, TrainEnd from, TrainEnd to) {
    rows.push_back({assumption, {std::move(from), std::move(to)}});
  };
  const LinkRange range = link_range(base);
  row("link latency",
      end(format_seconds(range.least_latency_s), [&](Assumptions& a) { a.link_latency_s = range.least_latency_s; }),
      end(format_seconds(range.most_latency_s), [&](Assumptions& a) { a.link_latency_s = range.most_latency_s; }));
  row("link bandwidth",
      end(times_text(range.least_bandwidth), [&](Assumptions& a) { a.link_bandwidth_factor = range.least_bandwidth; }),
      end(times_text(range.most_bandwidth), [&](Assumptions& a) { a.link_bandwidth_factor = range.most_bandwidth; }));
  row("overlap of links", end("none", [](Assumptions& a) { a.link_overlap = 0; }),
      end("0.9 of them", [](Assumptions& a) { a.link_overlap = 0.9; }));
  const double slow = 0.7 * base.kernel_efficiency, quick = 1.15 * base.kernel_efficiency;
  row("kernel efficiency", end(times_text(slow), [&](Assumptions& a) { a.kernel_efficiency = slow; }),
      end(times_text(quick), [&](Assumptions& a) { a.kernel_efficiency = quick; }));
  row("attention's backward", end("0.6 of the forward's rate", [](Assumptions& a) { a.backward_efficiency = 0.6; }),
      end("its rate", [](Assumptions& a) { a.backward_efficiency = 1; }));
  if (problem.config.moe.n_routed_experts > 0) {
    row("load of experts", end("balanced", [](Assumptions& a) { a.expert_load = ExpertLoad::balanced; }),
        end("power law 1.2", [](Assumptions& a) { a.expert_load = ExpertLoad::power_law_1_2; }));
  }
  const auto links = [](double latency_s, double factor, double overlap) {
    return [=](Assumptions& a) {
      a.link_latency_s = latency_s;
      a.link_bandwidth_factor = factor;
      a.link_overlap = overlap;
    };
  };
  row(kAllOfTheLinks, end("best", links(range.least_latency_s, range.most_bandwidth, 0.9)),
      end("worst", links(range.most_latency_s, range.least_bandwidth, 0)));
  return rows;
}

TrainSensitivity study_train(const TrainStudy& study) {
  TrainSensitivity result;
  result.described = {.value = "as described", .assumptions = study.base};
  result.roofline = {.value = "roofline alone", .assumptions = study.base};
  result.roofline.assumptions.roofline = true;
  result.rows = train_ranges(study.problem, study.base);
  for (const TrainPoint& point : study.search.points) {  // quickest first
    result.described.step_s.try_emplace(family_of(study.search.layout_of(point)), point.step_s);
  }
  std::vector<TrainEnd*> ends = {&result.roofline};
  for (TrainRange& row : result.rows) {
    for (TrainEnd& end : row.ends) ends.push_back(&end);
  }
  price(study, ends);
  result.ours = family_of_best(result.described, false);
  result.theirs = family_of_best(result.described, true);
  if (result.ours.empty() || result.theirs.empty()) result.ours.clear();
  take_intervals(result);
  const auto by_step = [](const TrainRange& r) { return spread(r, [](const TrainEnd& e) { return e.quickest_s(); }); };
  const auto by_ratio = [&](const TrainRange& r) {
    return spread(r, [&](const TrainEnd& e) { return result.ratio_at(e); });
  };
  std::stable_sort(result.rows.begin(), result.rows.end(),
                   [&](const TrainRange& a, const TrainRange& b) { return by_step(a) > by_step(b); });
  for (const TrainRange& row : result.rows) {
    if (row.assumption == kAllOfTheLinks) continue;  // several at once
    result.step_depends_on = row.assumption;
    break;
  }
  if (!result.ours.empty()) {
    std::stable_sort(result.rows.begin(), result.rows.end(),
                     [&](const TrainRange& a, const TrainRange& b) { return by_ratio(a) > by_ratio(b); });
  }
  return result;
}

}  // namespace isomer
