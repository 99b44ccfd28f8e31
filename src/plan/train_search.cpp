#include "plan/train_search.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace isomer {

namespace {

constexpr std::size_t kBest = 6;

void search(TrainPlan& plan) {
  const TrainProblem& problem = plan.options.problem;
  const auto begin = std::chrono::steady_clock::now();
  const double capacity =
      problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : plan.assumed.memory_capacity_bytes;
  for (std::uint32_t i = 0; i < plan.layouts.size(); ++i) {
    const TrainLayout& layout = plan.layouts[i];
    ++plan.examined;
    TrainUnfit reason = why_unfit(layout, problem.config, problem.seq, problem.batch);
    double bytes = 0;
    if (reason == TrainUnfit::fits) {
      bytes = train_memory(problem, plan.assumed, layout).total();
      if (bytes > capacity) reason = TrainUnfit::memory;
    }
    if (reason != TrainUnfit::fits) {
      ++plan.unfit[static_cast<std::size_t>(reason)];
      continue;
    }
    plan.points.push_back({i, train_step_time(problem, plan.assumed, layout).total(), bytes});
  }
  std::stable_sort(plan.points.begin(), plan.points.end(),
                   [](const TrainPoint& a, const TrainPoint& b) { return a.step_s < b.step_s; });
  plan.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Nothing fits: which limit binds, and the layout that comes nearest.
[[noreturn]] void refuse(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  std::optional<TrainLayout> nearest;
  double least = 0;
  std::string reasons;
  for (const TrainLayout& layout : plan.layouts) {
    if (why_unfit(layout, o.problem.config, o.problem.seq, o.problem.batch) != TrainUnfit::fits) continue;
    const double bytes = train_memory(o.problem, plan.assumed, layout).total();
    if (!nearest || bytes < least) {
      nearest = layout;
      least = bytes;
    }
  }
  for (int i = 1; i < kNumTrainUnfit; ++i) {
    if (plan.unfit[static_cast<std::size_t>(i)] == 0) continue;
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason_of(static_cast<TrainUnfit>(i)));
  }
  if (!nearest) {
    invalid_argument("no layout on {} devices can train {} with {} sequences of {} tokens a step: {}", o.devices,
                     o.problem.config.name, o.problem.batch, o.problem.seq, reasons);
  }
  const double capacity =
      o.problem.memory_limit_bytes > 0 ? o.problem.memory_limit_bytes : plan.assumed.memory_capacity_bytes;
  invalid_argument(
      "nothing fits: memory binds. The layout that needs least, {}, takes {:.1f} GB of a device's {:.1f} GB; give it "
      "more devices, shorter sequences or a narrower optimiser state",
      to_string(*nearest), least / 1e9, capacity / 1e9);
}

TrainChoice explain(const TrainPlan& plan, const TrainPoint& point) {
  const TrainProblem& problem = plan.options.problem;
  const TrainLayout& layout = plan.layouts[point.layout];
  return {.scheme = std::string(layout.scheme),
          .point = point,
          .layout = layout,
          .time = train_step_time(problem, plan.assumed, layout),
          .memory = train_memory(problem, plan.assumed, layout),
          .attention = train_attention(problem, layout),
          .utilisation = model_flops_utilisation(problem, plan.assumed, layout, point.step_s)};
}

void choose(TrainPlan& plan) {
  for (const TrainPoint& point : plan.points) {
    if (plan.best.size() == kBest) break;
    plan.best.push_back(explain(plan, point));
  }
  for (const TrainPoint& point : plan.points) {
    const TrainLayout& layout = plan.layouts[point.layout];
    const bool seen = std::any_of(plan.by_scheme.begin(), plan.by_scheme.end(),
                                  [&](const TrainChoice& c) { return c.scheme == layout.scheme; });
    if (layout.sequence_ranks() > 1 && !seen) plan.by_scheme.push_back(explain(plan, point));
  }
  if (plan.best.size() < 2) return;
  const auto ours = shares_of(plan.best[0].time), theirs = shares_of(plan.best[1].time);
  std::size_t worst = 0;
  for (std::size_t i = 1; i < ours.size(); ++i) {
    if (theirs[i].seconds - ours[i].seconds > theirs[worst].seconds - ours[worst].seconds) worst = i;
  }
  plan.next_why = fmt::format("{} {:+.1f} ms", theirs[worst].name, 1e3 * (theirs[worst].seconds - ours[worst].seconds));
}

/// Quickest over slowest scheme, with the best layout of each chosen anew under every assumption.
void study(TrainPlan& plan) {
  if (plan.by_scheme.size() < 2) return;
  plan.of = plan.by_scheme.front().scheme;
  plan.than = plan.by_scheme.back().scheme;
  const auto best_of = [&](const Hardware& hardware, const std::string& scheme) {
    double best = 0;
    for (const TrainPoint& point : plan.points) {  // what fits does not depend on the links
      const TrainLayout& layout = plan.layouts[point.layout];
      if (layout.sequence_ranks() == 1 || layout.scheme != scheme) continue;
      const double step = train_step_time(plan.options.problem, hardware, layout).total();
      if (best == 0 || step < best) best = step;
    }
    return best;
  };
  const auto add = [&](std::string assumption, std::string value, auto change) {
    plan.options.progress(fmt::format("sensitivity: {} {}", assumption, value));
    Assumptions assumptions = plan.options.assumptions;
    change(assumptions);
    const Hardware hardware = with_assumptions(plan.options.hardware, assumptions);
    plan.sensitivity.push_back(
        {std::move(assumption), std::move(value), best_of(hardware, plan.than) / best_of(hardware, plan.of)});
  };
  add("as described", "", [](Assumptions&) {});
  add("link latency", "1 us", [](Assumptions& a) { a.link_latency_s = 1e-6; });
  add("link latency", "15 us", [](Assumptions& a) { a.link_latency_s = 15e-6; });
  add("link bandwidth", "0.5 times", [](Assumptions& a) { a.link_bandwidth_factor = 0.5; });
  add("link bandwidth", "1.25 times", [](Assumptions& a) { a.link_bandwidth_factor = 1.25; });
  add("roofline alone", "", [](Assumptions& a) { a.roofline = true; });
}

}  // namespace

TrainPlan plan_train(TrainPlanOptions options) {
  TrainPlan plan{.options = std::move(options)};
  TrainPlanOptions& o = plan.options;
  if (o.devices < 1) invalid_argument("{} devices: at least 1 trains", o.devices);
  if (o.schemes.empty()) o.schemes = schemes_with_work(o.problem.config.attention);
  plan.assumed = with_assumptions(o.hardware, o.assumptions);
  o.progress("searching");
  plan.layouts = enumerate_train_layouts(o.problem.config, o.devices, o.schemes);
  search(plan);
  if (plan.points.empty()) refuse(plan);
  choose(plan);
  study(plan);
  return plan;
}

namespace {

nlohmann::json json_of(const TrainChoice& c) {
  auto time = nlohmann::json::array();
  for (const StepShare& share : shares_of(c.time)) time.push_back({{"part", share.name}, {"seconds", share.seconds}});
  return {{"layout", to_string(c.layout)},
          {"scheme", c.scheme},
          {"sp", c.layout.sp},
          {"groups", c.layout.groups},
          {"tp", c.layout.tp},
          {"pp", c.layout.pp},
          {"dp", c.layout.dp},
          {"ep", c.layout.ep},
          {"zero", c.layout.zero},
          {"recompute", name_of(c.layout.recompute)},
          {"priced_not_executed", c.layout.priced_not_executed()},
          {"step_s", c.point.step_s},
          {"model_flops_utilisation", c.utilisation},
          {"time", time},
          {"attention_block",
           {{"bytes_sent_forward", c.attention.sent.forward},
            {"bytes_sent_backward", c.attention.sent.backward},
            {"messages", c.attention.work.messages},
            {"flops_forward", c.attention.work.flops_forward},
            {"flops_backward", c.attention.work.flops_backward},
            {"saved_bytes", c.attention.work.saved_bytes},
            {"core_backward_bytes", c.attention.work.core_backward_bytes}}},
          {"memory_bytes",
           {{"weights", c.memory.weights},
            {"gradients", c.memory.gradients},
            {"optimizer", c.memory.optimizer},
            {"saved", c.memory.saved},
            {"transient", c.memory.transient},
            {"reserved", c.memory.reserved}}}};
}

}  // namespace

nlohmann::json to_json(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  auto best = nlohmann::json::array(), schemes = nlohmann::json::array(), unfit = nlohmann::json::array(),
       sensitivity = nlohmann::json::array();
  for (const TrainChoice& c : plan.best) best.push_back(json_of(c));
  for (const TrainChoice& c : plan.by_scheme) schemes.push_back(json_of(c));
  for (int i = 1; i < kNumTrainUnfit; ++i) {
    if (const auto count = plan.unfit[static_cast<std::size_t>(i)]; count > 0) {
      unfit.push_back({{"reason", reason_of(static_cast<TrainUnfit>(i))}, {"count", count}});
    }
  }
  for (const TrainRatio& r : plan.sensitivity) {
    sensitivity.push_back({{"assumption", r.assumption}, {"value", r.value}, {"ratio", r.ratio}});
  }
  return {
      {"command", "plan train"},
      {"model", o.problem.config.name},
      {"hardware", o.hardware.name},
      {"hardware_fitted", o.hardware.fitted},
      {"devices", o.devices},
      {"seq", o.problem.seq},
      {"batch", o.problem.batch},
      {"configurations",
       {{"examined", plan.examined}, {"priced", plan.points.size()}, {"omitted", unfit}, {"seconds", plan.seconds}}},
      {"best", best},
      {"by_scheme", schemes},
      {"ratio", {{"of", plan.of}, {"than", plan.than}, {"under", sensitivity}}}};
}

}  // namespace isomer
