// What the stages of an attention block share, latent (mla.h) or grouped-query (gqa.h): the layer they are given and
// the gradients they fill.
#pragma once

#include "core/rank_context.h"
#include "kernels/elementwise.h"
#include "model/config.h"
#include "model/weights.h"
#include "sharding/tokens.h"

namespace isomer {

/// Gradients of one block's weights, float32 (float64 for float64), under the weights' names. Only the rows of
/// `kv_b_heads` of kv_b_proj are held: all heads, or the rank's own under a scheme that up-projects after the exchange.
struct BlockGradients {
  AttentionWeights tensors;
  IndexRange kv_b_heads;
};

/// What every stage needs: one block's configuration and weights, and cos and sin of the rank's own tokens.
struct AttentionLayer {
  const ModelConfig& config;
  const AttentionWeights& weights;
  RopeRows rope;

  std::int64_t heads() const { return config.num_attention_heads; }
};

/// cos and sin rows of the positions first_position + ranges, in order, counted with the weights (a constant of the
/// model).
RopeRows make_rope_rows(RankContext& ctx, const ModelConfig& config, DType dtype, std::int64_t first_position,
                        const std::vector<IndexRange>& ranges, std::int64_t rows_per_position,
                        std::int64_t max_position);

}  // namespace isomer
