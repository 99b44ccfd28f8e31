#include "convert/rewrite.h"

#include <algorithm>

#include "kernels/reference/blocked_ops.h"

namespace isomer {

namespace {

using Values = std::vector<double>;

/// The first d rows of x [≥ d, columns] become Uᵀ times them.
void rotate_rows(Values& x, const Values& u, std::int64_t d, std::int64_t columns, int num_threads) {
  Values rotated(static_cast<std::size_t>(d * columns));
  reference::gemm_tiled({.m = d,
                         .n = columns,
                         .k = d,
                         .a = u.data(),
                         .a_stride = d,
                         .a_transposed = true,
                         .b = x.data(),
                         .b_stride = columns,
                         .c = rotated.data(),
                         .c_stride = columns},
                        num_threads);
  std::copy(rotated.begin(), rotated.end(), x.begin());
}

}  // namespace

LatentWeights rewrite_latent(const ModelConfig& config, LatentWeights w, const Values& u, int num_threads) {
  const std::int64_t d = config.kv_lora_rank;
  rotate_rows(w.kv_a, u, d, config.hidden_size, num_threads);
  if (!w.kv_a_bias.empty()) rotate_rows(w.kv_a_bias, u, d, 1, num_threads);
  const auto width = static_cast<std::size_t>(d);
  for (std::size_t i = 0; i < w.kv_b.size() && !w.gamma.empty(); ++i) w.kv_b[i] *= w.gamma[i % width];
  Values rotated(w.kv_b.size());
  reference::gemm_tiled({.m = static_cast<std::int64_t>(w.kv_b.size()) / d,
                         .n = d,
                         .k = d,
                         .a = w.kv_b.data(),
                         .a_stride = d,
                         .b = u.data(),
                         .b_stride = d,
                         .c = rotated.data(),
                         .c_stride = d},
                        num_threads);
  w.kv_b = std::move(rotated);
  std::fill(w.gamma.begin(), w.gamma.end(), 1.0);
  return w;
}

const std::vector<LatentWeightName>& latent_weight_names() {
  using W = LatentWeights;
  static const std::vector<LatentWeightName> names = {{"self_attn.kv_a_proj_with_mqa.weight", &W::kv_a},
                                                      {"self_attn.kv_a_proj_with_mqa.bias", &W::kv_a_bias},
                                                      {"self_attn.kv_a_layernorm.weight", &W::gamma},
                                                      {"self_attn.kv_b_proj.weight", &W::kv_b}};
  return names;
}

}  // namespace isomer
