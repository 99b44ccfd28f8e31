#include <nlohmann/json.hpp>

#include "plan/report_json.h"
#include "plan/train_report.h"

namespace isomer {

namespace {

using nlohmann::json;

json json_of(const TrainPlan& plan, const TrainPoint& point) {
  const TrainLayout& layout = plan.search.layout_of(point);
  return {{"layout", to_string(layout)},
          {"ranks", layout.sequence_ranks()},
          {"step_s", point.step_s},
          {"tokens_per_s_per_device", tokens_per_s_per_device(plan, point)},
          {"memory_total_bytes", point.memory_bytes},
          {"priced_not_executed", layout.priced_not_executed()}};
}

json json_of(const TrainPlan& plan, const TrainChoice& c) {
  json result = json_of(plan, c.point);
  json time = time_json(shares_of(c.time));
  for (json& part : time) {
    part["priced_not_executed"] = !is_held_to_executor(part["part"].get_ref<const std::string&>(), c.layout);
  }
  result.update({{"scheme", c.layout.scheme},
                 {"sp", c.layout.sp},
                 {"groups", c.layout.groups},
                 {"tp", c.layout.tp},
                 {"pp", c.layout.pp},
                 {"dp", c.layout.dp},
                 {"ep", c.layout.ep},
                 {"zero", c.layout.zero},
                 {"recompute", name_of(c.layout.recompute)},
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
                   {"reserved", c.memory.reserved}}}});
  return result;
}

json json_of(const TrainPlan& plan, const TrainAnswer& a) {
  json result = json_of(plan, a.choice);
  result.update({{"question", a.question}, {"bound", a.bound}, {"operations", operations_json(a.operations)}});
  if (a.next) {
    result["next"] = json_of(plan, a.next->point);
    result["next"]["loses_on"] = a.next_loses_on;
  }
  return result;
}

json json_of(const TrainPlan& plan, const std::vector<TrainFamily>& families) {
  auto result = json::array();
  for (const TrainFamily& family : families) {
    auto points = json::array();
    for (const TrainPoint& point : family.points) points.push_back(json_of(plan, point));
    result.push_back({{"family", family.family}, {"baseline", family.baseline}, {"points", points}});
  }
  return result;
}

json json_of(const Interval& interval) {
  return {{"base", interval.base}, {"lowest", interval.lowest}, {"highest", interval.highest}};
}

json json_of(const TrainSensitivity& s) {
  auto rows = json::array(), behind = json::array();
  for (const TrainRange& row : s.rows) {
    auto ends = json::array();
    for (const TrainEnd& end : row.ends) {
      json entry = {{"value", end.value}, {"step_s", end.quickest_s()}};
      if (!s.ours.empty()) entry["ratio"] = s.ratio_at(end);
      ends.push_back(std::move(entry));
    }
    rows.push_back({{"assumption", row.assumption}, {"ends", ends}});
  }
  for (const TrainBehind& b : s.behind) {
    json entry = json_of(b.times);
    entry["family"] = b.family;
    behind.push_back(std::move(entry));
  }
  json result = {
      {"step_s", json_of(s.step_s)}, {"rows", rows}, {"behind", behind}, {"step_depends_on", s.step_depends_on}};
  if (!s.ours.empty()) {
    result.update({{"ours", s.ours}, {"theirs", s.theirs}, {"ratio", json_of(s.ratio)}});
  }
  return result;
}

/// The slowest scheme over the quickest, under each assumption.
json ratio_json(const TrainPlan& plan) {
  auto under = json::array();
  if (!plan.sensitivity || plan.by_scheme.size() < 2) return {{"of", ""}, {"than", ""}, {"under", under}};
  const TrainSensitivity& s = *plan.sensitivity;
  const std::string of = family_of(plan.by_scheme.front().layout), than = family_of(plan.by_scheme.back().layout);
  const auto add = [&](const std::string& assumption, const std::string& value, const TrainEnd& end) {
    under.push_back({{"assumption", assumption}, {"value", value}, {"ratio", end.step_s.at(than) / end.step_s.at(of)}});
  };
  add("as described", "", s.described);
  for (const TrainRange& row : s.rows) {
    for (const TrainEnd& end : row.ends) add(row.assumption, end.value, end);
  }
  add("roofline alone", "", s.roofline);
  return {{"of", of}, {"than", than}, {"under", under}};
}

}  // namespace

json to_json(const TrainPlan& plan) {
  const TrainPlanOptions& o = plan.options;
  auto best = json::array(), schemes = json::array(), chosen = json::array();
  for (const TrainChoice& c : plan.best) best.push_back(json_of(plan, c));
  for (const TrainChoice& c : plan.by_scheme) schemes.push_back(json_of(plan, c));
  for (const TrainAnswer& a : plan.chosen) chosen.push_back(json_of(plan, a));
  const double limit = o.problem.memory_limit_bytes;
  json result = {{"command", "plan train"},
                 {"model", o.problem.config.name},
                 {"hardware", o.hardware.name},
                 {"hardware_fitted", o.hardware.fitted},
                 {"curves_from", o.hardware.curves_from},
                 {"not_fitted", plan.stand_ins},
                 {"roofline", o.assumptions.roofline},
                 {"assumptions", assumptions_json(o.assumptions)},
                 {"devices", o.devices},
                 {"seq", o.problem.seq},
                 {"batch", o.problem.batch},
                 {"memory_limit_bytes", limit > 0 ? limit : plan.assumed.memory_capacity_bytes},
                 {"configurations", configurations_json<TrainUnfit>(plan.search.examined, plan.search.points.size(),
                                                                    plan.search.unfit, plan.search.seconds)},
                 {"best", best},
                 {"by_scheme", schemes},
                 {"by_ranks", json_of(plan, plan.by_ranks)},
                 {"frontiers", json_of(plan, plan.frontiers)},
                 {"chosen", chosen},
                 {"ratio", ratio_json(plan)}};
  if (plan.sensitivity) result["sensitivity"] = json_of(*plan.sensitivity);
  return result;
}

}  // namespace isomer
