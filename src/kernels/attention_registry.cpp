#include "kernels/attention_registry.h"

#include <fmt/ranges.h>

#include "core/cpu_features.h"

namespace isomer {

namespace {

std::string needs(DType wanted, bool supported, std::string_view instructions, const AttentionShape& shape) {
  if (shape.dtype != wanted)
    return fmt::format("computes {}, the inputs are {}", name_of(wanted), name_of(shape.dtype));
  if (!supported) return fmt::format("the processor has no {}", instructions);
  return {};
}

/// Few columns, in whole vectors of 32 elements, without a part that heads share.
std::string needs_few(const AttentionShape& s) {
  constexpr std::int64_t kColumns = 4, kVector = 32;
  std::string reason = needs(DType::bf16, cpu_features().avx512bf16, "AVX-512 BF16", s);
  if (!reason.empty()) return reason;
  if (s.num_columns() < 1 || s.num_columns() > kColumns) {
    return fmt::format("for 1 to {} queries that share a key head, there are {}", kColumns, s.num_columns());
  }
  if (s.rope_width > 0) return "keys have a part that heads share";
  if (s.key_width < 1 || s.key_width % kVector != 0 || s.value_width < 1 || s.value_width % kVector != 0) {
    return fmt::format("widths {} and {} are not whole vectors of {}", s.key_width, s.value_width, kVector);
  }
  return {};
}

constexpr AttentionImplementation kImplementations[] = {
    {"few_avx512bf16", needs_few, &kAttentionFewAvx512Bf16},
    {"avx512bf16",
     [](const AttentionShape& s) { return needs(DType::bf16, cpu_features().avx512bf16, "AVX-512 BF16", s); },
     &kAttentionAvx512Bf16},
    {"avx512", [](const AttentionShape& s) { return needs(DType::f32, cpu_features().avx512, "AVX-512", s); },
     &kAttentionAvx512},
    {"avx512_storage_bf16",
     [](const AttentionShape& s) { return needs(DType::bf16, cpu_features().avx512, "AVX-512", s); },
     &kAttentionAvx512StorageBf16},
    {"avx2", [](const AttentionShape& s) { return needs(DType::f32, cpu_features().avx2, "AVX2 and FMA", s); },
     &kAttentionAvx2},
    {"avx2_storage_bf16",
     [](const AttentionShape& s) { return needs(DType::bf16, cpu_features().avx2, "AVX2 and FMA", s); },
     &kAttentionAvx2StorageBf16},
    {"f64_blas", [](const AttentionShape& s) { return needs(DType::f64, true, "", s); }, &kAttentionF64},
    {"reference", [](const AttentionShape&) { return std::string(); }, nullptr},
};

}  // namespace

std::span<const AttentionImplementation> attention_implementations() { return kImplementations; }

const AttentionImplementation& find_attention_implementation(const AttentionShape& shape, std::string_view name) {
  std::vector<std::string_view> names;
  for (const auto& implementation : kImplementations) {
    names.push_back(implementation.name);
    if (!name.empty() && implementation.name != name) continue;
    const std::string reason = implementation.declines(shape);
    if (reason.empty()) return implementation;
    if (!name.empty()) invalid_argument("attention implementation '{}' declines: {}", name, reason);
  }
  invalid_argument("there is no attention implementation '{}'; there are {}", name, fmt::join(names, ", "));
}

}  // namespace isomer
