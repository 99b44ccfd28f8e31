#include "layers/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace isomer {
namespace {

/// θ^(−2i/r), what every scaling starts from.
std::vector<double> unscaled_inv_freq(double theta, std::int64_t rope_dim) {
  std::vector<double> inv_freq(static_cast<std::size_t>(rope_dim / 2));
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope_dim));
  }
  return inv_freq;
}

double yarn_mscale(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * std::log(factor) + 1 : 1; }

/// YaRN (Peng et al. 2023, section 3.2) as DeepSeek has it: pairs that turn more than β_fast times within the original
/// context keep their frequency, those below β_slow are interpolated, a ramp over the pair index lies between.
void apply_yarn(const RopeConfig& rope, std::int64_t rope_dim, RopeFrequencies& frequencies) {
  const auto r = static_cast<double>(rope_dim);
  const auto pair_with_turns = [&](double turns) {
    const auto original = static_cast<double>(rope.original_max_position_embeddings);
    return r * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
  };
  const double low = std::max(std::floor(pair_with_turns(rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_with_turns(rope.beta_slow)), r - 1);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < frequencies.inv_freq.size(); ++i) {
    const double keep = 1 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const double inv = frequencies.inv_freq[i];
    frequencies.inv_freq[i] = inv / rope.factor * (1 - keep) + inv * keep;
  }
  frequencies.magnitude = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim);
}

/// Llama 3.1: wavelengths beyond original/low_freq_factor are interpolated, those within original/high_freq_factor
/// kept, those between blended linearly in the number of turns.
void apply_llama3(const RopeConfig& rope, RopeFrequencies& frequencies) {
  for (double& inv : frequencies.inv_freq) {
    const double turns = static_cast<double>(rope.original_max_position_embeddings) * inv / (2 * std::numbers::pi);
    const double keep =
        std::clamp((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0);
    inv = (1 - keep) * inv / rope.factor + keep * inv;
  }
}

/// LongRoPE (Ding et al. 2024): a divisor per pair, another set of them once the run is longer than the original
/// context; the magnitude does not depend on which of the two is in use.
void apply_longrope(const RopeConfig& rope, std::int64_t max_position, RopeFrequencies& frequencies) {
  const auto& divisors = max_position > rope.original_max_position_embeddings ? rope.long_factor : rope.short_factor;
  for (std::size_t i = 0; i < frequencies.inv_freq.size(); ++i) frequencies.inv_freq[i] /= divisors[i];
  if (rope.factor > 1) {
    const auto original = static_cast<double>(rope.original_max_position_embeddings);
    frequencies.magnitude = std::sqrt(1 + std::log(rope.factor) / std::log(original));
  }
}

void check_longrope_factors(const std::vector<double>& divisors, const char* name, std::int64_t num_pairs) {
  if (static_cast<std::int64_t>(divisors.size()) != num_pairs) {
    invalid_argument("{} has {} values: longrope needs one for each of the {} rotated pairs", name, divisors.size(),
                     num_pairs);
  }
  for (const double divisor : divisors) {
    if (!(divisor > 0)) invalid_argument("{} holds {}: divisors of frequencies must be positive", name, divisor);
  }
}

void validate_scaling(const RopeConfig& rope, std::int64_t rope_dim) {
  if (!(rope.theta > 0)) invalid_argument("rope_theta {} must be positive", rope.theta);
  if (rope.scaling == RopeScalingKind::none) return;
  if (!(rope.factor > 0)) invalid_argument("rope_scaling factor {} must be positive", rope.factor);
  if (rope.scaling == RopeScalingKind::linear) return;
  if (rope.original_max_position_embeddings < 2) {
    invalid_argument("original_max_position_embeddings {}: this rope scaling needs the context of the original model",
                     rope.original_max_position_embeddings);
  }
  if (rope.scaling == RopeScalingKind::yarn && !(rope.theta > 1 && rope.beta_fast > 0 && rope.beta_slow > 0)) {
    invalid_argument("yarn needs rope_theta > 1 and positive beta_fast and beta_slow, not {}, {} and {}", rope.theta,
                     rope.beta_fast, rope.beta_slow);
  }
  if (rope.scaling == RopeScalingKind::llama3 && !(rope.high_freq_factor > rope.low_freq_factor)) {
    invalid_argument("high_freq_factor {} must exceed low_freq_factor {}", rope.high_freq_factor, rope.low_freq_factor);
  }
  if (rope.scaling == RopeScalingKind::longrope) {
    check_longrope_factors(rope.short_factor, "short_factor", rope_dim / 2);
    check_longrope_factors(rope.long_factor, "long_factor", rope_dim / 2);
  }
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& rope, std::int64_t rope_dim, std::int64_t max_position) {
  if (rope_dim < 0 || rope_dim % 2 != 0) {
    invalid_argument("rope dimension {}: rotation works on pairs, give an even number (0 for none)", rope_dim);
  }
  if (!rope.rotate) return {.inv_freq = std::vector<double>(static_cast<std::size_t>(rope_dim / 2)), .magnitude = 1};
  if (rope_dim == 0) return {};
  validate_scaling(rope, rope_dim);
  RopeFrequencies frequencies{.inv_freq = unscaled_inv_freq(rope.theta, rope_dim), .magnitude = 1};
  switch (rope.scaling) {
    case RopeScalingKind::none: break;
    case RopeScalingKind::linear:
      for (double& inv : frequencies.inv_freq) inv /= rope.factor;
      break;
    case RopeScalingKind::yarn: apply_yarn(rope, rope_dim, frequencies); break;
    case RopeScalingKind::llama3: apply_llama3(rope, frequencies); break;
    case RopeScalingKind::longrope: apply_longrope(rope, max_position, frequencies); break;
  }
  return frequencies;
}

RopeTable rope_table(const RopeConfig& rope, std::int64_t rope_dim, const std::vector<std::int64_t>& positions,
                     std::int64_t max_position) {
  const RopeFrequencies frequencies = rope_frequencies(rope, rope_dim, max_position);
  RopeTable table{.rope_dim = rope_dim, .cos = {}, .sin = {}};
  table.cos.reserve(positions.size() * frequencies.inv_freq.size());
  table.sin.reserve(positions.size() * frequencies.inv_freq.size());
  for (const std::int64_t position : positions) {
    for (const double inv : frequencies.inv_freq) {
      const double angle = static_cast<double>(position) * inv;
      table.cos.push_back(std::cos(angle) * frequencies.magnitude);
      table.sin.push_back(std::sin(angle) * frequencies.magnitude);
    }
  }
  return table;
}

}  // namespace isomer
