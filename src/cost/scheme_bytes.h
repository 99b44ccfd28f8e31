// Closed forms of the bytes that a rank sends to other ranks in one attention block, per training scheme, uneven shards
// included (docs/communication.md). Tests and every `compare` hold the counted bytes equal to these.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "model/config.h"
#include "sharding/tokens.h"

namespace isomer {

struct SchemeBytes {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
  std::int64_t total() const { return forward + backward; }
};

/// Bytes that `rank` sends; parameter gradients not included. Summed latent gradients travel in the statistics' dtype
/// (float32). Throws std::invalid_argument for a scheme without a closed form.
SchemeBytes scheme_bytes_sent(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens,
                              DType activations, int rank);
/// The same, received.
SchemeBytes scheme_bytes_received(std::string_view scheme, const ModelConfig& config, const TokenShards& tokens,
                                  DType activations, int rank);

/// Bytes that `rank` sends to sum the parameter gradients (float32): all-reduce of all, but for kv_b_proj under laga
/// and absorbed, whose own heads' rows are gathered.
std::int64_t gradient_sync_bytes_sent(std::string_view scheme, const ModelConfig& config, int num_ranks, int rank);

}  // namespace isomer
