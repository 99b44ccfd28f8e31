#include <nlohmann/json.hpp>

#include "plan/decode_report.h"
#include "plan/report_json.h"

namespace isomer {

namespace {

nlohmann::json json_of(const DecodePlan& plan, const DecodePoint& point) {
  return {{"layout", to_string(plan.search.layout_of(point))},
          {"devices", point.devices},
          {"batch", point.batch},
          {"step_s", point.step_s},
          {"tokens_per_s_per_user", point.per_user()},
          {"tokens_per_s_per_device", point.per_device()}};
}

nlohmann::json json_of(const DecodePlan& plan, const ChosenLayout& chosen) {
  auto json = json_of(plan, chosen.point);
  json.update({{"question", chosen.question},
               {"bound", chosen.bound},
               {"time", time_json(shares_of(chosen.time))},
               {"hop_b_parts", chosen.time.parts},
               {"operations", operations_json(chosen.operations)},
               {"memory_bytes",
                {{"weights", chosen.memory.weights},
                 {"cache", chosen.memory.cache},
                 {"workspace", chosen.memory.workspace},
                 {"reserved", chosen.memory.reserved}}}});
  if (chosen.next) {
    json["next"] = json_of(plan, chosen.next->point);
    json["next"]["loses_on"] = chosen.next->why;
  }
  return json;
}

nlohmann::json json_of(const LayoutRatios& ratios) {
  return {{"interactivity", ratios.interactivity}, {"throughput", ratios.throughput}, {"at_step_s", ratios.at_step_s}};
}

nlohmann::json json_of(const Sensitivity& sensitivity) {
  auto rows = nlohmann::json::array();
  for (const SensitivityRow& row : sensitivity.rows) {
    auto ends = nlohmann::json::array();
    for (const AssumedEnd& end : row.ends) ends.push_back({{"value", end.value}, {"ratios", json_of(end.ratios)}});
    rows.push_back({{"assumption", row.assumption},
                    {"ends", ends},
                    {"spread_interactivity", row.spread_interactivity()},
                    {"spread_throughput", row.spread_throughput()}});
  }
  return {{"ours", "helix"},
          {"theirs", "baselines"},
          {"base", json_of(sensitivity.base)},
          {"lowest", json_of(sensitivity.lowest)},
          {"highest", json_of(sensitivity.highest)},
          {"rows", rows}};
}

}  // namespace

nlohmann::json to_json(const DecodePlan& plan) {
  const DecodePlanOptions& o = plan.options;
  auto frontiers = nlohmann::json::array();
  for (const FamilyFrontier& frontier : plan.frontiers) {
    auto points = nlohmann::json::array();
    for (const DecodePoint& point : frontier.points) points.push_back(json_of(plan, point));
    frontiers.push_back({{"family", frontier.family}, {"exact", frontier.exact}, {"points", points}});
  }
  auto overall = nlohmann::json::array(), chosen = nlohmann::json::array();
  for (const DecodePoint& point : plan.overall) overall.push_back(json_of(plan, point));
  for (const ChosenLayout& layout : plan.chosen) chosen.push_back(json_of(plan, layout));
  const double limit = o.problem.memory_limit_bytes;
  nlohmann::json json = {{"command", "plan decode"},
                         {"model", o.problem.config.name},
                         {"hardware", o.hardware.name},
                         {"hardware_fitted", o.hardware.fitted},
                         {"not_fitted", plan.stand_ins},
                         {"curves_from", o.hardware.curves_from},
                         {"roofline", o.assumptions.roofline},
                         {"assumptions", assumptions_json(o.assumptions)},
                         {"memory_limit_bytes", limit > 0 ? limit : plan.assumed.memory_capacity_bytes},
                         {"context", o.problem.context},
                         {"max_devices", o.search.max_devices},
                         {"precision",
                          {{"weights", name_of(o.problem.precision.weights)},
                           {"cache", name_of(o.problem.precision.cache)},
                           {"activations", name_of(o.problem.precision.activations)}}},
                         {"configurations", configurations_json<Unfit>(plan.search.examined, plan.search.points.size(),
                                                                       plan.search.unfit, plan.search.seconds)},
                         {"frontiers", frontiers},
                         {"overall", overall},
                         {"chosen", chosen}};
  if (o.ttl_s) json["ttl_s"] = *o.ttl_s;
  if (plan.sensitivity) json["sensitivity"] = json_of(*plan.sensitivity);
  return json;
}

}  // namespace isomer
