// The roofline of Helix's appendix (arXiv 2507.07120): time to read the cache and the weights of one layer from memory,
// nothing else.
#pragma once

#include <cstdint>

namespace isomer {

struct HelixRoofline {
  double batch = 1;
  std::int64_t query_heads = 1, kv_heads = 1;
  double head_dim = 1, hidden = 1, ffn = 1, context = 1;
  double element_bytes = 0.5, bandwidth_bytes_per_s = 1;

  /// B·2·⌈K/TPA⌉·H_sz·(S/KVP)·e / bandwidth
  double cache_read_s(std::int64_t tpa, std::int64_t kvp) const;
  /// As printed: W_o cut by TPA.
  double weight_read_s(std::int64_t tpa, std::int64_t tpf) const;
  /// As the method has it: W_o cut by all N devices.
  double weight_read_of_method_s(std::int64_t tpa, std::int64_t devices, std::int64_t tpf) const;
};

}  // namespace isomer
