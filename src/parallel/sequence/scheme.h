// A sequence-parallel scheme: how one attention block, y = x + attention(RMSNorm(x)), runs forward and backward when
// its tokens are spread over ranks. One file a scheme; the stages it composes are in layers/mla.h and layers/gqa.h,
// what crosses the wire in exchange.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "layers/attention_core.h"
#include "layers/gqa.h"
#include "layers/mla.h"
#include "parallel/sequence/groups.h"
#include "sharding/layout.h"
#include "sharding/tokens.h"

namespace isomer {

/// What a scheme is given: the layer with cos and sin of the rank's own tokens, who owns which tokens, and who talks to
/// whom.
struct SequenceBlock {
  AttentionLayer layer;
  TokenShards tokens;
  SequenceGroups groups;
  AttentionCore core = AttentionCore::fused;
  std::int64_t first_position = 0;
  /// Packed documents: for each sequence of the batch the positions at which a document begins, increasing; tokens see
  /// their own document only. Empty: each sequence is one document.
  std::vector<std::vector<std::int64_t>> document_starts;

  int inner_rank() const { return groups.inner->rank(); }  // index in the group
  int group() const { return groups.outer->rank(); }
  std::int64_t group_rows() const { return tokens.group_rows(group()); }
  /// Heads are spread over the inner ranks.
  HeadShards head_shards() const { return {layer.heads(), tokens.ranks_per_group}; }
  IndexRange my_heads() const { return head_shards().heads(inner_rank()); }
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
  /// x [T, D] with T = tokens.rows(rank).
  virtual Forward forward(RankContext& ctx, const SequenceBlock& block, Tensor x) const = 0;
  virtual Backward backward(RankContext& ctx, const SequenceBlock& block, std::unique_ptr<Saved> saved,
                            Tensor dy) const = 0;
};

/// Names of the schemes for one kind of attention, in the order of reports.
const std::vector<std::string>& sequence_scheme_names(AttentionKind kind = AttentionKind::mla);

/// The scheme of a layout ("laga:4,v=view", "laga:4,ring:2") for this model's kind of attention. Throws
/// std::invalid_argument for an unknown name or option, or axes that don't belong together.
std::unique_ptr<SequenceScheme> make_sequence_scheme(const Layout& layout, const ModelConfig& config);

/// Why a layout can't run this model on so many ranks (data-parallel replicas included), with what would fit; empty if
/// it can. Throws as make_sequence_scheme does.
std::string why_unfit(const Layout& layout, const ModelConfig& config, int num_ranks, std::int64_t seq,
                      AttentionCore core = AttentionCore::fused);

/// Every scheme on one axis, in the order of reports, then the two-dimensional layouts that `num_ranks` allow: as many
/// inner ranks as divide the heads and leave two groups at least; last the schemes for the other kind of attention,
/// of which why_unfit says so.
std::vector<Layout> all_sequence_layouts(const ModelConfig& config, int num_ranks);

/// Sums the parameter gradients over all ranks of all replicas (all-reduce in float32; where each rank holds the
/// gradient of its own heads' rows of kv_b_proj, those are summed over the ranks that hold the same heads and then
/// gathered inside the inner group). Phase gradient_sync.
void sync_gradients(RankContext& ctx, const SequenceBlock& block, BlockGradients& gradients);

// The factories, one a file.
std::unique_ptr<SequenceScheme> make_explicit(const Layout& layout);
std::unique_ptr<SequenceScheme> make_explicit_shared_rope(const Layout& layout);
std::unique_ptr<SequenceScheme> make_absorbed(const Layout& layout);
std::unique_ptr<SequenceScheme> make_absorbed_two_product(const Layout& layout);
std::unique_ptr<SequenceScheme> make_laga(const Layout& layout);
std::unique_ptr<SequenceScheme> make_ring(const Layout& layout);
std::unique_ptr<SequenceScheme> make_latent_gather(const Layout& layout);
std::unique_ptr<SequenceScheme> make_latent_ring(const Layout& layout);
std::unique_ptr<SequenceScheme> make_explicit_gqa(const Layout& layout);
std::unique_ptr<SequenceScheme> make_ring_gqa(const Layout& layout);

}  // namespace isomer
