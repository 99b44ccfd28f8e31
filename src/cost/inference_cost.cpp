#include "cost/inference_cost.h"

#include <cmath>

namespace isomer {

OpCost product_cost(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k, ElementBytes bytes) {
  const auto b = static_cast<double>(batch), dm = static_cast<double>(m), dn = static_cast<double>(n),
             dk = static_cast<double>(k);
  return {2 * b * dm * dn * dk, b * (dm * dk * bytes.in + dk * dn * bytes.stored), b * dm * dn * bytes.out};
}

double expert_pairs(const ExpertShape& shape) {
  return static_cast<double>(shape.tokens) * static_cast<double>(shape.top_k) / static_cast<double>(shape.ep);
}

double expected_active_experts(const ExpertShape& shape) {
  const auto experts = static_cast<double>(shape.experts);
  const double missed = 1 - static_cast<double>(shape.top_k) / experts;
  const auto tokens = static_cast<double>(shape.tokens);
  const double none = missed <= 0 ? (shape.tokens > 0 ? 0.0 : 1.0) : std::exp(tokens * std::log(missed));
  return experts / static_cast<double>(shape.ep) * (1 - none);
}

OpCost experts_cost(const ExpertShape& shape, ElementBytes bytes) {
  const double pairs = expert_pairs(shape);
  const auto hidden = static_cast<double>(shape.hidden);
  const double inter = static_cast<double>(shape.inter) / static_cast<double>(shape.tp);
  const double weights = expected_active_experts(shape) * 3 * hidden * inter;
  return {6 * pairs * hidden * inter, weights * bytes.stored + pairs * (hidden + inter) * bytes.in,
          pairs * (inter * bytes.in + hidden * bytes.out)};
}

double expected_devices_visited(std::int64_t experts, std::int64_t top_k, std::int64_t ep) {
  // C(E − E/N, k) / C(E, k) as a product of k ratios.
  const auto total = static_cast<double>(experts);
  const double elsewhere = total - total / static_cast<double>(ep);
  double none = 1;
  for (std::int64_t i = 0; i < top_k; ++i) {
    const auto taken = static_cast<double>(i);
    none *= std::fmax(0, elsewhere - taken) / (total - taken);
  }
  return static_cast<double>(ep) * (1 - none);
}

OpCost decode_attention_cost(const DecodeShape& shape, ElementBytes bytes) {
  const auto rows = static_cast<double>(shape.batch) * static_cast<double>(shape.context);
  const auto queries = static_cast<double>(shape.batch) * static_cast<double>(shape.heads);
  const auto key = static_cast<double>(shape.key_width), value = static_cast<double>(shape.value_width);
  return {2 * rows * static_cast<double>(shape.heads) * (key + value),
          rows * static_cast<double>(shape.row_elements) * bytes.stored + queries * key * bytes.in,
          queries * value * bytes.out};
}

double exchanged_bytes(std::int64_t devices, double bytes) {
  const auto n = static_cast<double>(devices);
  return devices > 1 ? (n - 1) / n * bytes : 0.0;
}

}  // namespace isomer
