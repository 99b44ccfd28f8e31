#include "model/tpla.h"

#include <fmt/ranges.h>

#include <array>
#include <bit>
#include <utility>

#include "core/error.h"
#include "model/json_text.h"

namespace isomer {

namespace {

template <class Enum, std::size_t N>
using Names = std::array<std::pair<Enum, std::string_view>, N>;

constexpr Names<TplaTransform, 5> kTransforms = {{{TplaTransform::none, "none"},
                                                  {TplaTransform::hadamard, "hadamard"},
                                                  {TplaTransform::pca, "pca"},
                                                  {TplaTransform::pca_centred, "pca-centred"},
                                                  {TplaTransform::query_aware, "query-aware"}}};
constexpr Names<TplaRms, 2> kRms = {{{TplaRms::exact, "exact"}, {TplaRms::sliced, "sliced"}}};
constexpr Names<TplaKappa, 4> kKappas = {{{TplaKappa::one, "one"},
                                          {TplaKappa::lsq, "lsq"},
                                          {TplaKappa::share, "share"},
                                          {TplaKappa::inverse_share, "inverse-share"}}};

template <class Enum, std::size_t N>
std::string_view name_in(const Names<Enum, N>& names, Enum value) {
  for (const auto& [entry, name] : names) {
    if (entry == value) return name;
  }
  return "?";
}

template <class Enum, std::size_t N>
Enum parse_in(std::string_view option, const Names<Enum, N>& names, std::string_view text) {
  std::vector<std::string_view> known;
  for (const auto& [entry, name] : names) {
    if (name == text) return entry;
    known.push_back(name);
  }
  invalid_argument("{} '{}': expected one of {}", option, printable(text), fmt::join(known, ", "));
}

}  // namespace

std::string_view name_of(TplaTransform transform) { return name_in(kTransforms, transform); }
std::string_view name_of(TplaRms rms) { return name_in(kRms, rms); }
std::string_view name_of(TplaKappa kappa) { return name_in(kKappas, kappa); }

TplaTransform parse_tpla_transform(std::string_view text) { return parse_in("--transform", kTransforms, text); }
TplaRms parse_tpla_rms(std::string_view text) { return parse_in("--rms", kRms, text); }
TplaKappa parse_tpla_kappa(std::string_view text) { return parse_in("--kappa", kKappas, text); }

void check_tpla_options(const TplaOptions& options, const ModelConfig& config) {
  const std::int64_t d = config.kv_lora_rank, g = options.num_shards, m = options.shared_columns;
  if (config.attention != AttentionKind::mla) {
    invalid_argument("{}: its attention is grouped-query, without a latent to shard; convert it to MLA first",
                     config.name);
  }
  if (g < 1 || g > d) invalid_argument("--shards {}: from 1 to kv_lora_rank, {}", g, d);
  if (m < 0 || m > d) invalid_argument("--shared-columns {}: from 0 to kv_lora_rank, {}", m, d);
  if ((d - m) % g != 0) {
    invalid_argument("--shards {}: it doesn't divide {} columns (kv_lora_rank {}{}); take a divisor of them{}", g,
                     d - m, d, m > 0 ? fmt::format(", less {} shared", m) : "",
                     m > 0 ? ", or share another number" : "");
  }
  if (options.transform == TplaTransform::hadamard && !std::has_single_bit(static_cast<std::uint64_t>(d))) {
    invalid_argument("--transform hadamard: kv_lora_rank is {}, which is no power of two; take pca, or none", d);
  }
  if (options.rms == TplaRms::sliced && !config.kv_a_layernorm) {
    invalid_argument("--rms sliced: {} has no kv_a_layernorm, so there is no RMS to slice; take --rms exact",
                     config.name);
  }
}

}  // namespace isomer
