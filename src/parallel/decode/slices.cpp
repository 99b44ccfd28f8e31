#include "parallel/decode/slices.h"

#include "kernels/attention_parts.h"

namespace isomer {

Slices::Slices(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config) {
  const int columns = layout.shards.tpa, rank = comm.rank();
  of_column_ = comm.split(rank % columns, rank / columns);
  of_slice_ = comm.split(rank / columns, rank % columns);
  heads_ = column_of_rank(layout, config, rank);
}

HeadCut column_of_rank(const DecodeLayout& layout, const ModelConfig& config, int rank) {
  return column_heads_of(config, layout.shards.tpa, rank % layout.shards.tpa);
}

PartialAttention attend_slice(RankContext& ctx, const DecodeBlock& block, const Tensor& q, bool values_before) {
  if (block.step.explicit_form) {
    return attend_prefix(ctx, block, q, [&](const StepSequence& sequence, IndexRange positions) {
      return load_rows(ctx, block, sequence, positions);
    });
  }
  PartialAttention partial = attend_cache(ctx, block, q);
  if (values_before) partial.out = values_of(ctx, block, partial.out);
  return partial;
}

Tensor packed(RankContext& ctx, const PartialAttention& partial) {
  const Tensor& out = partial.out;
  Tensor rows = ctx.empty("packed partial o", MemoryClass::communication, out.dtype(),
                          {out.size(0), out.size(1), out.size(2) + packed_lse_elements(out.dtype())});
  pack_partial_attention(ctx, out, partial.lse, rows);
  return rows;
}

Tensor packed_of_slices(RankContext& ctx, int num_slices, std::int64_t rows, std::int64_t heads,
                        const PartialAttention& like) {
  const DType dtype = like.out.dtype();
  return ctx.empty("partial o of all slices", MemoryClass::communication, dtype,
                   {num_slices, rows, heads, like.out.size(2) + packed_lse_elements(dtype)});
}

Tensor merged(RankContext& ctx, const Tensor& parts) {
  Tensor out = ctx.empty("merged o", MemoryClass::workspace, parts.dtype(),
                         {parts.size(1), parts.size(2), parts.size(3) - packed_lse_elements(parts.dtype())});
  merge_packed_attention(ctx, parts, out);
  return out;
}

}  // namespace isomer
