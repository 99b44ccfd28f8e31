#include "plan/explain.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/quantity_text.h"
#include "plan/curves.h"

namespace isomer {

std::string bound_of_step(const std::vector<PricedOperation>& operations) {
  std::map<std::string, double> by_bound;
  double total = 0;
  for (const PricedOperation& op : operations) {
    by_bound[op.bound] += op.seconds;
    total += op.seconds;
  }
  const auto largest = std::max_element(by_bound.begin(), by_bound.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  if (largest == by_bound.end()) return "nothing";
  return fmt::format("{}, {:.0f} % of the step", largest->first, 100 * largest->second / total);
}

std::string loses_on(const std::vector<StepShare>& ours, const std::vector<StepShare>& theirs) {
  ISOMER_CHECK(ours.size() == theirs.size() && !ours.empty(), "{} parts against {}", ours.size(), theirs.size());
  std::size_t worst = 0;
  for (std::size_t i = 1; i < ours.size(); ++i) {
    if (theirs[i].seconds - ours[i].seconds > theirs[worst].seconds - ours[worst].seconds) worst = i;
  }
  const double more = theirs[worst].seconds - ours[worst].seconds;
  return fmt::format("{} {}{}", theirs[worst].name, more < 0 ? "−" : "+", format_seconds(std::abs(more)));
}

void add_stand_ins(const Hardware& hardware, const std::vector<PricedOperation>& operations,
                   std::vector<std::string>& names) {
  if (!hardware.fitted || hardware.roofline) return;
  for (const PricedOperation& priced : operations) {
    const Operation& op = priced.operation;
    if (priced.seconds <= 0 || op.kind == OperationKind::elementwise) continue;
    const Precision compute = hardware.compute_precision(op.compute);
    if (hardware.curves->find(op.kind, compute, op.storage, hardware.expert_load).exact) continue;
    std::string name(name_of(op.kind));
    if (!is_collective(op.kind)) name += fmt::format(" {}/{}", name_of(compute), name_of(op.storage));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
}

}  // namespace isomer
