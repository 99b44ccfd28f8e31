#include "parallel/decode/latent_shards.h"

namespace isomer {

LatentShards::LatentShards(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config) {
  const DecodeShards& s = layout.shards;
  group_ = comm.split(comm.rank() / s.latent_shards, comm.rank() % s.latent_shards);
  latent_ = config.kv_lora_rank;
  shared_ = s.shared_columns;
  width_ = (latent_ - shared_) / s.latent_shards;
  whole_rope_ = s.whole_rope;
  rope_width_ = whole_rope_ ? config.qk_rope_head_dim : config.qk_rope_head_dim / s.latent_shards;
}

Tensor LatentShards::cut(RankContext& ctx, const Tensor& rows) const {
  Tensor mine =
      ctx.empty("latent cut", MemoryClass::workspace, rows.dtype(), {rows.size(0), 1, shared_ + width_ + rope_width_});
  std::int64_t to = 0;
  for (const IndexRange& from : {shared(), own(), IndexRange{latent_ + rope().begin, rope_width_}}) {
    if (from.count == 0) continue;
    copy(ctx, "cut latent", rows.slice(2, from.begin, from.count), mine.slice(2, to, from.count));
    to += from.count;
  }
  return mine;
}

CachedRows LatentShards::gather_rows(RankContext& ctx, const DecodeBlock& block, const StepSequence& sequence,
                                     IndexRange positions) const {
  CachedRows rows = load_rows(ctx, block, sequence, positions);
  if (num_shards() == 1) return rows;
  const std::int64_t whole_rope = block.model.config.qk_rope_head_dim;
  Tensor all = ctx.empty("prefix rows", MemoryClass::communication, rows.keys.dtype(),
                         {rows.keys.size(0), 1, latent_ + whole_rope});
  const Tensor rope = rows.keys.slice(2, shared_ + width_, rope_width_);
  std::vector<Tensor> latent_parts, rope_parts;
  for (int shard = 0; shard < num_shards(); ++shard) {
    latent_parts.push_back(all.slice(2, own_of(shard).begin, width_));
    rope_parts.push_back(all.slice(2, latent_ + rope_of(shard).begin, rope_width_));
  }
  if (width_ > 0) group_->all_gather("prefix latent", rows.keys.slice(2, shared_, width_), latent_parts);
  if (shared_ > 0) copy(ctx, "shared columns", rows.keys.slice(2, 0, shared_), all.slice(2, 0, shared_));
  if (!whole_rope_) {
    group_->all_gather("prefix k_pe", rope, rope_parts);
  } else if (whole_rope > 0) {
    copy(ctx, "rope key", rope, rope_parts[0]);
  }
  rows.keys = std::move(all);
  return rows;
}

Tensor LatentShards::explicit_attention(RankContext& ctx, const DecodeBlock& block, const Tensor& x) const {
  const Projections p = project(ctx, block, x);
  store_rows(ctx, block, cut(ctx, p.keys), Tensor());
  const auto whole_rows = [&](const StepSequence& sequence, IndexRange positions) {
    return gather_rows(ctx, block, sequence, positions);
  };
  return join_heads(ctx, block, attend_prefix(ctx, block, p.q, whole_rows).out, x);
}

}  // namespace isomer
