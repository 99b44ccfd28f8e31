#include "plan/report_json.h"

namespace isomer {

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
