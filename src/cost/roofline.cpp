#include "cost/roofline.h"

namespace isomer {

namespace {

double heads_of(std::int64_t kv_heads, std::int64_t tpa) { return static_cast<double>((kv_heads + tpa - 1) / tpa); }

double real(std::int64_t value) { return static_cast<double>(value); }

}  // namespace

double HelixRoofline::cache_read_s(std::int64_t tpa, std::int64_t kvp) const {
  return batch * 2 * heads_of(kv_heads, tpa) * head_dim * (context / real(kvp)) * element_bytes / bandwidth_bytes_per_s;
}

double HelixRoofline::weight_read_s(std::int64_t tpa, std::int64_t tpf) const {
  return weight_read_of_method_s(tpa, tpa, tpf);
}

double HelixRoofline::weight_read_of_method_s(std::int64_t tpa, std::int64_t devices, std::int64_t tpf) const {
  const double query = hidden * real(query_heads) / real(tpa) * head_dim;
  const double output = hidden * real(query_heads) / real(devices) * head_dim;
  const double key_value = 2 * hidden * heads_of(kv_heads, tpa) * head_dim;
  return (query + output + key_value + 3 * hidden * ffn / real(tpf)) * element_bytes / bandwidth_bytes_per_s;
}

}  // namespace isomer
