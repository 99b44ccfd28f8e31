// A sequence-parallel scheme: how one attention block, y = x + MLA(RMSNorm(x)), runs forward and backward when its
// tokens are spread over ranks. One file a scheme; the stages it composes are in layers/mla.h, what crosses the wire in
// exchange.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "layers/attention_core.h"
#include "layers/mla.h"
#include "sharding/layout.h"
#include "sharding/tokens.h"

namespace isomer {

/// What a scheme is given: the layer with cos and sin of the rank's own tokens, and who owns which tokens.
struct SequenceBlock {
  AttentionLayer layer;
  TokenShards tokens;
  AttentionCore core = AttentionCore::fused;
  std::int64_t first_position = 0;

  HeadShards head_shards() const { return {layer.heads(), tokens.num_ranks}; }
};

class SequenceScheme {
 public:
  /// What the forward keeps for the backward.
  struct Saved {
    virtual ~Saved() = default;
  };
  struct Forward {
    Tensor y;  // [T, D], the rank's tokens
    std::unique_ptr<Saved> saved;
  };
  struct Backward {
    Tensor dx;                 // [T, D]
    BlockGradients gradients;  // this rank's share; summed over ranks by sync_gradients
  };
  virtual ~SequenceScheme() = default;
  /// x [T, D] with T = tokens.rows(rank).count.
  virtual Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const = 0;
  virtual Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> saved,
                            Tensor dy) const = 0;
};

/// Names of the schemes, in the order of reports.
const std::vector<std::string>& sequence_scheme_names();

/// The scheme of a layout ("laga:4,v=view"). Throws std::invalid_argument for an unknown name or option.
std::unique_ptr<SequenceScheme> make_sequence_scheme(const Layout& layout);

/// Why a layout can't run this model on so many ranks, with what would fit; empty if it can.
std::string why_unfit(const Layout& layout, const ModelConfig& config, int num_ranks, std::int64_t seq);

/// Sums the parameter gradients over the ranks (all-reduce in float32; kv_b_proj gathered instead where each rank holds
/// complete gradients of its own heads). Phase gradient_sync.
void sync_gradients(RankContext& ctx, const AttentionLayer& layer, BlockGradients& gradients);

// The factories, one a file.
std::unique_ptr<SequenceScheme> make_explicit(const LayoutAxis& axis);
std::unique_ptr<SequenceScheme> make_explicit_shared_rope(const LayoutAxis& axis);
std::unique_ptr<SequenceScheme> make_absorbed(const LayoutAxis& axis);
std::unique_ptr<SequenceScheme> make_absorbed_two_product(const LayoutAxis& axis);
std::unique_ptr<SequenceScheme> make_laga(const LayoutAxis& axis);

}  // namespace isomer
