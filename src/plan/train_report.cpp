#include "plan/train_report.h"

#include <algorithm>

#include "core/error.h"
#include "core/quantity_text.h"
#include "plan/explain.h"

namespace isomer {

namespace {

constexpr std::size_t kBest = 6;

double capacity_of(const TrainPlan& plan) {
  const double limit = plan.options.problem.memory_limit_bytes;
  return limit > 0 ? limit : plan.assumed.memory_capacity_bytes;
}

/// The number of sequences nearest to what was asked for that some layout divides (of two, the smaller).
std::int64_t nearest_batch(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  const auto divides = [&](std::int64_t batch) {
    return std::any_of(plan.search.layouts.begin(), plan.search.layouts.end(), [&](const TrainLayout& layout) {
      return why_unfit(layout, o.problem.config, o.problem.seq, batch) == TrainUnfit::fits;
    });
  };
  constexpr std::int64_t kFarthest = 1024;  // beyond, a multiple of the devices will do
  for (std::int64_t away = 1; away <= std::min<std::int64_t>(o.devices, kFarthest); ++away) {
    if (o.problem.batch > away && divides(o.problem.batch - away)) return o.problem.batch - away;
    if (divides(o.problem.batch + away)) return o.problem.batch + away;
  }
  return (o.problem.batch + o.devices - 1) / o.devices * o.devices;
}

/// Nothing fits: which limit binds, and the layout that comes nearest.
[[noreturn]] void refuse(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  std::optional<TrainLayout> nearest;
  double least = 0;
  std::string reasons;
  for (const TrainLayout& layout : plan.search.layouts) {
    if (why_unfit(layout, o.problem.config, o.problem.seq, o.problem.batch) != TrainUnfit::fits) continue;
    const double bytes = train_memory(o.problem, plan.assumed, layout).total();
    if (!nearest || bytes < least) {
      nearest = layout;
      least = bytes;
    }
  }
  for (int i = 1; i < kNumTrainUnfit; ++i) {
    if (plan.search.unfit[static_cast<std::size_t>(i)] == 0) continue;
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason_of(static_cast<TrainUnfit>(i)));
  }
  if (!nearest) {
    invalid_argument(
        "no layout on {} devices can train {} with {} sequences of {} tokens a step: {}; the nearest that divides: {} "
        "sequences a step",
        o.devices, o.problem.config.name, o.problem.batch, o.problem.seq, reasons, nearest_batch(plan));
  }
  const auto enough = fewest_train_devices(o.problem, plan.assumed, o.schemes);
  const std::string remedy =
      enough ? fmt::format("give it {} devices ({} fits)", enough->devices(), to_string(*enough))
             : fmt::format("no layout fits on up to {} devices either, which is as far as is looked: give it",
                           std::min(plan.assumed.max_devices(), kMaxTrainDevices));
  invalid_argument(
      "nothing fits: memory binds. The layout that needs least, {}, takes {} of a device's {}; {}{} shorter sequences "
      "or a narrower optimiser state",
      to_string(*nearest), format_bytes(least), format_bytes(capacity_of(plan)), remedy, enough ? "," : "");
}

TrainChoice explain(const TrainPlan& plan, const TrainPoint& point) {
  const TrainProblem& problem = plan.options.problem;
  const TrainLayout& layout = plan.search.layout_of(point);
  return {.point = point,
          .layout = layout,
          .time = train_step_time(problem, plan.assumed, layout),
          .memory = train_memory(problem, plan.assumed, layout),
          .attention = train_attention(problem, layout),
          .utilisation = model_flops_utilisation(problem, plan.assumed, layout, point.step_s)};
}

/// Answers with what the filter takes and comes first in `points`; the next is the best of other axes among them.
void answer(TrainPlan& plan, const std::string& question, const std::vector<TrainPoint>& points,
            const TrainFilter& filter, bool by_memory = false) {
  const auto taken = [&](const TrainPoint& point) { return filter(plan.search.layout_of(point)); };
  const auto first = std::find_if(points.begin(), points.end(), taken);
  if (first == points.end()) return;
  TrainAnswer a{.question = question, .choice = explain(plan, *first)};
  a.operations = train_operations(plan.options.problem, plan.assumed, a.choice.layout);
  a.bound = bound_of_step(a.operations);
  const auto next = std::find_if(first, points.end(), [&](const TrainPoint& point) {
    return taken(point) && !same_train_axes(plan.search.layout_of(point), a.choice.layout);
  });
  if (next != points.end()) {
    a.next = explain(plan, *next);
    const double more = next->memory_bytes - first->memory_bytes;
    a.next_loses_on = by_memory && more > 0 ? fmt::format("memory +{}", format_bytes(more))
                                            : loses_on(shares_of(a.choice.time), shares_of(a.next->time)) + " a step";
  }
  plan.chosen.push_back(std::move(a));
}

void choose(TrainPlan& plan) {
  const TrainSearch& search = plan.search;
  for (const TrainPoint& point : search.points) {
    if (plan.best.size() == kBest) break;
    plan.best.push_back(explain(plan, point));
  }
  for (const TrainPoint& point : search.points) {
    const TrainLayout& layout = search.layout_of(point);
    const bool seen = std::any_of(plan.by_scheme.begin(), plan.by_scheme.end(),
                                  [&](const TrainChoice& c) { return c.layout.scheme == layout.scheme; });
    if (layout.sequence_ranks() > 1 && !seen) plan.by_scheme.push_back(explain(plan, point));
  }
  answer(plan, "quickest", search.points, [](const TrainLayout&) { return true; });
  answer(plan, "quickest baseline", search.points, is_train_baseline);
  answer(plan, "quickest without sequence parallelism", search.points,
         [](const TrainLayout& layout) { return layout.sequence_ranks() == 1; });
  answer(plan, "quickest that isomer train runs", search.points,
         [](const TrainLayout& layout) { return !layout.priced_not_executed(); });
  std::vector<TrainPoint> by_memory = search.points;
  std::stable_sort(by_memory.begin(), by_memory.end(),  // of equal ones the quickest
                   [](const TrainPoint& a, const TrainPoint& b) { return a.memory_bytes < b.memory_bytes; });
  answer(
      plan, "least memory", by_memory, [](const TrainLayout&) { return true; }, true);
  for (const TrainAnswer& a : plan.chosen) add_stand_ins(plan.assumed, a.operations, plan.stand_ins);
}

TrainFamily& family_in(std::vector<TrainFamily>& families, const TrainLayout& layout) {
  const std::string name = family_of(layout);
  for (TrainFamily& family : families) {
    if (family.family == name) return family;
  }
  families.push_back({.family = name, .baseline = is_train_baseline(layout)});
  return families.back();
}

void compare_families(TrainPlan& plan) {
  const TrainSearch& search = plan.search;
  for (const TrainPoint& point : search.points) {  // quickest first, and so are the families
    const TrainLayout& layout = search.layout_of(point);
    auto& points = family_in(plan.by_ranks, layout).points;
    const bool seen = std::any_of(points.begin(), points.end(), [&](const TrainPoint& p) {
      return search.layout_of(p).sequence_ranks() == layout.sequence_ranks();
    });
    if (!seen) points.push_back(point);
  }
  for (TrainFamily& family : plan.by_ranks) {
    std::sort(family.points.begin(), family.points.end(), [&](const TrainPoint& a, const TrainPoint& b) {
      return search.layout_of(a).sequence_ranks() < search.layout_of(b).sequence_ranks();
    });
    TrainFamily frontier{.family = family.family, .baseline = family.baseline};
    frontier.points =
        memory_frontier(search, [&](const TrainLayout& layout) { return family_of(layout) == family.family; });
    plan.frontiers.push_back(std::move(frontier));
  }
}

}  // namespace

TrainPlan plan_train(TrainPlanOptions options) {
  TrainPlan plan{.options = std::move(options)};
  TrainPlanOptions& o = plan.options;
  if (o.devices < 1) invalid_argument("{} devices: at least 1 trains", o.devices);
  if (o.schemes.empty()) o.schemes = schemes_with_work(o.problem.config.attention);
  plan.assumed = with_assumptions(o.hardware, o.assumptions);
  o.progress("searching");
  plan.search = search_train(o.problem, plan.assumed, o.devices, o.schemes);
  if (plan.search.points.empty()) refuse(plan);
  choose(plan);
  compare_families(plan);
  if (o.sensitivity) {
    plan.sensitivity = study_train({o.problem, o.hardware, o.assumptions, plan.search, o.progress});
  }
  return plan;
}

double tokens_per_s_per_device(const TrainPlan& plan, const TrainPoint& point) {
  const TrainProblem& problem = plan.options.problem;
  return static_cast<double>(problem.batch) * static_cast<double>(problem.seq) / point.step_s / plan.options.devices;
}

}  // namespace isomer
