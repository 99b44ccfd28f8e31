// Tensor-parallel latent attention as a value: how the d columns of a latent row are dealt to g shards, and the scalars
// that a shard's decode needs (model-math: TPLA). What `isomer convert tpla` writes beside a checkpoint (convert/
// side_file.h reads it) and what the decode layouts take.
//
//   columns of ĉ   0 ……… m │ m ……… m+w │ m+w ……… m+2w │ …      w = (d − m) / g
//                  shared   │ shard 0   │ shard 1       │ …
//
// The m shared columns stand on every rank and enter every rank's logits once; their values are summed on rank 0.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace isomer {

/// The orthogonal U that the latent is multiplied by before it is cut.
enum class TplaTransform : std::uint8_t { none, hadamard, pca, pca_centred, query_aware };
/// RMS of a latent row in decode: `exact` (of all d columns), or `sliced`: estimated from a rank's own columns.
enum class TplaRms : std::uint8_t { exact, sliced };
/// Where κ of a shard's logits comes from: 1, least squares per head, p_i, or 1/p_i.
enum class TplaKappa : std::uint8_t { one, lsq, share, inverse_share };

std::string_view name_of(TplaTransform transform);
std::string_view name_of(TplaRms rms);
std::string_view name_of(TplaKappa kappa);
/// The inverse of name_of. Throw std::invalid_argument listing the names that there are.
TplaTransform parse_tpla_transform(std::string_view text);
TplaRms parse_tpla_rms(std::string_view text);
TplaKappa parse_tpla_kappa(std::string_view text);

/// Who attends to a shard. tpla: every head to each, with a softmax of its own. gla: a group of heads to one, which it
/// norms by itself. whole_softmax: every head, with one softmax over the summed logits of all shards, so that nothing
/// is sliced but the RMS (for ablations).
enum class LatentSharding : std::uint8_t { tpla, gla, whole_softmax };

struct TplaRange {
  std::int64_t begin = 0, count = 0;
  std::int64_t end() const { return begin + count; }
};

struct TplaOptions {
  TplaTransform transform = TplaTransform::pca;
  int num_shards = 2;               // g
  std::int64_t shared_columns = 0;  // m
  TplaRms rms = TplaRms::exact;
  TplaKappa kappa = TplaKappa::one;

  TplaRange shared() const { return {0, shared_columns}; }
  /// Columns of shard i alone, without the shared ones; d = kv_lora_rank.
  TplaRange shard(int i, std::int64_t kv_lora_rank) const {
    const std::int64_t width = (kv_lora_rank - shared_columns) / num_shards;
    return {shared_columns + i * width, width};
  }
  /// Cache elements of one token, layer and rank: (d − m)/g + m + r.
  std::int64_t cache_width(const ModelConfig& config) const {
    return (config.kv_lora_rank - shared_columns) / num_shards + shared_columns + config.qk_rope_head_dim;
  }
};

/// The scalars of one layer.
struct TplaLayer {
  std::vector<double> kappa;      // [h, g]
  std::vector<double> rms_scale;  // [g]: a_i, 1 / the share of the columns that rank i has; 1 with exact RMS
  std::vector<double> shares;     // [g]: p_i, shard i's part of the second moment of the split columns
  std::vector<double> moments;    // [d]: E[(Uᵀf)²] of every column, f = c/RMS(c)
};

/// Throws std::invalid_argument naming option, value, limit and remedy: a model without a latent, a g that does not
/// divide d − m, m outside [0, d], Hadamard for a d that is no power of two, sliced RMS without kv_a_layernorm.
void check_tpla_options(const TplaOptions& options, const ModelConfig& config);

}  // namespace isomer
