#include "plan/report_json.h"

namespace isomer {

nlohmann::json assumptions_json(const Assumptions& assumptions) {
  nlohmann::json json = {{"link_latency_s", nullptr},
                         {"link_bandwidth_factor", assumptions.link_bandwidth_factor},
                         {"fp4_efficiency", assumptions.fp4_efficiency},
                         {"overlap_contention", assumptions.overlap_contention},
                         {"kernel_efficiency", assumptions.kernel_efficiency},
                         {"link_overlap", assumptions.link_overlap}};
  if (assumptions.link_latency_s) json["link_latency_s"] = *assumptions.link_latency_s;
  return json;
}

nlohmann::json time_json(const std::vector<StepShare>& shares) {
  auto json = nlohmann::json::array();
  for (const StepShare& share : shares) json.push_back({{"part", share.name}, {"seconds", share.seconds}});
  return json;
}

nlohmann::json operations_json(const std::vector<PricedOperation>& operations) {
  auto json = nlohmann::json::array();
  for (const PricedOperation& op : operations) {
    json.push_back({{"name", op.operation.name},
                    {"kind", name_of(op.operation.kind)},
                    {"times", op.times},
                    {"flops", cost_of(op.operation).flops},
                    {"bytes_sent", is_collective(op.operation.kind) ? cost_of(op.operation).bytes_written : 0},
                    {"messages", messages_of(op.operation)},
                    {"seconds", op.seconds},
                    {"bound", op.bound}});
  }
  return json;
}

}  // namespace isomer
