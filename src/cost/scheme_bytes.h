// Closed forms of the bytes that a rank sends to other ranks in one attention block, per training scheme, uneven shards
// included (docs/communication.md). Tests and every `compare` hold the counted bytes equal to these.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "model/config.h"
#include "sharding/layout.h"

namespace isomer {

struct SchemeBytes {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
  std::int64_t forward_passed = 0, backward_passed = 0;  // of these, what passes round the groups
  std::int64_t total() const { return forward + backward; }
};

/// A block of `batch` sequences of `seq` tokens under one layout, whose axes all have their sizes (sized_layout).
struct SchemeCase {
  const Layout& layout;
  const ModelConfig& config;
  std::int64_t seq = 0;
  std::int64_t batch = 1;
  DType activations = DType::f32;
};

/// Bytes that `rank` of a sequence sends; parameter gradients not included. Summed gradients (of the latent where it
/// was gathered, of keys and values where they pass round) travel in the statistics' dtype (float32); recomputation
/// that sends again counts in the backward. Throws std::invalid_argument for a scheme without a closed form.
SchemeBytes scheme_bytes_sent(const SchemeCase& block, int rank);
/// The same, received.
SchemeBytes scheme_bytes_received(const SchemeCase& block, int rank);

/// Bytes that `rank` of all sends to sum the parameter gradients (float32): all-reduce of all, but for kv_b_proj under
/// laga and absorbed: its own heads' rows are summed over the ranks that hold the same and gathered in the inner group.
std::int64_t gradient_sync_bytes_sent(const Layout& layout, const ModelConfig& config, int rank);

}  // namespace isomer
