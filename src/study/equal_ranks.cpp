#include "study/equal_ranks.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "sharding/cache_shards.h"
#include "sharding/tokens.h"
#include "sharding/weight_slices.h"

namespace isomer {

namespace {

using Signature = std::vector<std::int64_t>;

/// Sizes that distinguish the ranks of one stage, whose elements, heads and columns are dealt as evenly as they go.
class StageSignature {
 public:
  StageSignature(const ModelConfig& config, const DecodeShards& shards, int place)
      : c_(config), s_(shards), place_(place) {}

  Signature operator()(std::int64_t rows, std::int64_t context) {
    heads();
    ffn();
    sums(rows, context);
    signature_.push_back(CacheShards{s_.kvp, s_.chunk}.count(place_ / s_.tpa, context));
    signature_.push_back(s_.scheme == DecodeScheme::medha && place_ / s_.tpa == 0 ? 1 : 0);
    return signature_;
  }

 private:
  void deal(std::int64_t total, int parts, int part) { signature_.push_back(balanced_part(total, parts, part).count); }

  void heads() {
    const HeadCut column = column_heads_of(c_, s_.tpa, place_ % s_.tpa);
    signature_.insert(signature_.end(), {column.query.count, column.kv.count});
    deal(column.query.count, s_.kvp, place_ / s_.tpa);
    deal(c_.num_attention_heads, s_.group(), place_);
  }
  void ffn() {
    for (const std::int64_t width : {c_.intermediate_size, c_.moe.n_shared_experts * c_.moe.moe_intermediate_size}) {
      deal(width, s_.devices(), place_);
      deal(width, s_.tpa, place_ % s_.tpa);
    }
    deal(c_.moe.moe_intermediate_size, s_.tpf, place_ % s_.tpf);
    deal(c_.moe.n_routed_experts, s_.ep, place_ / s_.tpf % s_.ep);
  }
  /// Shares of what is all-reduced or reduce-scattered.
  void sums(std::int64_t rows, std::int64_t context) {
    const std::int64_t hidden = rows * c_.hidden_size, logits = rows * c_.num_attention_heads * context;
    for (const std::int64_t elements : {hidden, logits, rows}) {
      deal(elements, s_.devices(), place_);
      deal(elements, s_.tpa, place_ % s_.tpa);
      deal(elements, s_.tpf, place_ % s_.tpf);
      deal(elements, s_.latent_shards, place_ % s_.latent_shards);
    }
  }

  const ModelConfig& c_;
  const DecodeShards& s_;
  int place_;
  Signature signature_;
};

/// Layers of each kind, and whether others stand before and behind.
Signature signature_of_stage(const ModelConfig& c, const DecodeLayout& layout, int stage) {
  const IndexRange layers = balanced_part(c.num_hidden_layers, layout.pp, stage);
  const std::int64_t dense = c.moe.n_routed_experts > 0 ? c.moe.first_k_dense_replace : c.num_hidden_layers;
  const std::int64_t dense_here = std::clamp<std::int64_t>(dense - layers.begin, 0, layers.count);
  return {dense_here, layers.count - dense_here, stage == 0 ? 1 : 0, stage + 1 == layout.pp ? 1 : 0};
}

}  // namespace

std::vector<int> equal_ranks(const ModelConfig& config, const DecodeLayout& layout, std::int64_t batch,
                             std::int64_t context) {
  const DecodeShards& s = layout.shards;
  std::map<Signature, int> first;
  std::vector<int> equal;
  const std::int64_t parts = std::min<std::int64_t>(layout.pp, batch);
  for (int rank = 0; rank < layout.devices(); ++rank) {
    const int stage = rank / layout.stage_devices(), place = rank % layout.stage_devices();
    Signature signature = signature_of_stage(config, layout, stage);
    for (std::int64_t part : {std::int64_t{0}, parts - 1}) {  // the batch passes in parts of two sizes at most
      const std::int64_t rows = balanced_part(batch, parts, part).count;
      const Signature more = StageSignature(config, s, place)(rows, context);
      signature.insert(signature.end(), more.begin(), more.end());
    }
    if (s.data_parallel > 1) signature.push_back(rank);
    equal.push_back(first.emplace(std::move(signature), rank).first->second);
  }
  return equal;
}

}  // namespace isomer
