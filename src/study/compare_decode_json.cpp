#include <nlohmann/json.hpp>

#include "study/compare_decode.h"
#include "study/machine.h"

namespace isomer {

namespace {

nlohmann::json rank_json(const DecodeMeasure& m, bool dry) {
  nlohmann::json json = {{"rank", m.rank},
                         {"cache_bytes", m.cache_bytes},
                         {"bytes_sent_per_step", m.bytes_sent()},
                         {"bytes_sent_per_step_by_collective", m.bytes_by_name},
                         {"messages_per_step", m.messages}};
  if (dry) return json;
  json.update({{"seconds_per_token", m.seconds},
               {"seconds_waiting", m.seconds_waiting},
               {"seconds_by_part", m.seconds_by_part}});
  return json;
}

nlohmann::json layout_json(const DecodeLayoutReport& l, std::int64_t batch) {
  const auto measured = [&](auto value) { return l.dry ? nlohmann::json() : nlohmann::json(value); };
  const auto per_token = [&](std::int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(batch); };
  const DecodeMeasure& busiest = l.run.busiest();
  nlohmann::json by_collective;
  for (const auto& [name, bytes] : busiest.bytes_by_name) by_collective[name] = per_token(bytes);
  auto ranks = nlohmann::json::array();
  for (const DecodeMeasure& m : l.run.ranks) ranks.push_back(rank_json(m, l.dry));
  return {{"name", l.name},
          {"layout", l.layout},
          {"cache_bytes_per_rank", l.cache_bytes},
          {"bytes_sent_per_rank_per_token", per_token(l.bytes_sent)},
          {"bytes_predicted_per_rank_per_token", per_token(l.bytes_predicted)},
          {"bytes_uniform_routing_per_rank_per_token",
           l.bytes_uniform > 0 ? nlohmann::json(l.bytes_uniform / static_cast<double>(batch)) : nlohmann::json()},
          {"bytes_by_collective_per_token", by_collective},
          {"bytes_agree", l.bytes_agree},
          {"messages_per_token", per_token(busiest.messages)},
          {"messages_per_step", busiest.messages},
          {"seconds_per_token", measured(l.run.seconds())},
          {"clock", l.dry ? nlohmann::json() : nlohmann::json(l.run.virtual_clock ? "virtual" : "wall")},
          {"max_logit_error", measured(l.max_logit_error)},
          {"bound", measured(l.bound)},
          {"within_bound", measured(l.within_bound())},
          {"exact", l.exact},
          {"first_different_token",
           l.first_different_token < 0 ? nlohmann::json() : nlohmann::json(l.first_different_token)},
          {"note", l.note},
          {"ranks", ranks}};
}

}  // namespace

nlohmann::json to_json(const DecodeCompareReport& report) {
  const auto& o = report.options;
  auto layouts = nlohmann::json::array();
  for (const DecodeLayoutReport& l : report.layouts) layouts.push_back(layout_json(l, o.workload.batch));
  auto omitted = nlohmann::json::array();
  for (const auto& entry : report.omitted) omitted.push_back({{"layout", entry.layout}, {"reason", entry.reason}});
  nlohmann::json json = machine_json(threads_per_rank(o.group), o.workload.seed);
  json.update(
      {{"command", "compare"},
       {"phase", "decode"},
       {"model", o.workload.config.name},
       {"weights", o.weights_source},
       {"cache", o.cache_source},
       {"ranks", o.group.num_ranks},
       {"context", o.workload.context},
       {"batch", o.workload.batch},
       {"tokens", o.workload.tokens},
       {"dtype", name_of(o.workload.dtype)},
       {"backend", name_of(o.group.backend)},
       {"dry_run", o.group.dry_run},
       {"max_abs_reference", o.group.dry_run ? nlohmann::json() : nlohmann::json(report.max_reference)},
       {"bound_says_little", !o.group.dry_run && report.bound_says_little()},
       {"link", o.group.link.emulated ? nlohmann::json{{"latency_s", o.group.link.latency_s},
                                                       {"bandwidth_bytes_per_s", o.group.link.bandwidth_bytes_per_s}}
                                      : nlohmann::json()},
       {"layouts", layouts},
       {"omitted", omitted},
       {"good", report.good()}});
  return json;
}

}  // namespace isomer
