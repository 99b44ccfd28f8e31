#include "train/expert_loads.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/communicator.h"

namespace isomer {

void ExpertLoads::count(std::int64_t layer, const Routing& routing) {
  const std::int64_t first = layer * num_experts_;
  for (const std::int32_t expert : routing.experts) loads_[static_cast<std::size_t>(first + expert)] += 1;
}

void ExpertLoads::sum_over_ranks(RankContext& ctx) {
  if (loads_.empty() || ctx.world_size() == 1) return;
  const PhaseScope phase(ctx, Phase::gradient_sync);
  const Tensor sum =
      ctx.empty("expert loads", MemoryClass::communication, DType::f64, {static_cast<std::int64_t>(loads_.size())});
  if (!ctx.dry_run()) std::memcpy(sum.raw(), loads_.data(), loads_.size() * sizeof(double));
  ctx.comm().all_reduce("expert loads", sum);
  if (!ctx.dry_run()) std::memcpy(loads_.data(), sum.raw(), loads_.size() * sizeof(double));
}

void ExpertLoads::update_correction_biases(const ModelWeights& weights, double rate) const {
  for (std::int64_t l = 0; l < num_layers_; ++l) {
    const Tensor bias = weights.layers[static_cast<std::size_t>(l)].moe.e_score_correction_bias;
    if (!bias) continue;
    const double* load = loads_.data() + l * num_experts_;
    const double mean = std::accumulate(load, load + num_experts_, 0.0) / static_cast<double>(num_experts_);
    for (std::int64_t e = 0; e < num_experts_; ++e) {
      const double direction = load[e] < mean ? 1 : load[e] > mean ? -1 : 0;
      bias.data<float>()[e] += static_cast<float>(rate * direction);
    }
  }
}

double ExpertLoads::largest() const {
  double largest = 0;
  const auto experts = static_cast<std::ptrdiff_t>(num_experts_);
  for (auto begin = loads_.begin(); begin != loads_.end(); begin += experts) {
    const double mean = std::accumulate(begin, begin + experts, 0.0) / static_cast<double>(experts);
    if (mean > 0) largest = std::max(largest, *std::max_element(begin, begin + experts) / mean);
  }
  return largest;
}

}  // namespace isomer
