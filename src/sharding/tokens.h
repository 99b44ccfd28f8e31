// Which rank owns which tokens and which heads: pure index maps.
#pragma once

#include <algorithm>
#include <cstdint>

namespace isomer {

/// A half-open range of indices.
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t end() const { return begin + count; }
};

/// Part `index` of `total` things in `parts` contiguous parts; the first total mod parts get one more.
inline IndexRange balanced_part(std::int64_t total, std::int64_t parts, std::int64_t index) {
  const std::int64_t base = total / parts, extra = total % parts;
  return {index * base + std::min(index, extra), base + (index < extra ? 1 : 0)};
}

/// Contiguous shards of a batch of equally long sequences. Rows are sequence-major, [seq, batch, …]: token s of
/// sequence b is row s·batch + b, so that every rank's rows, and what it sends to a peer, are contiguous whatever the
/// batch is.
struct TokenShards {
  std::int64_t seq = 0;
  std::int64_t batch = 1;
  int num_ranks = 1;

  /// Positions that `rank` holds of every sequence.
  IndexRange positions(int rank) const { return balanced_part(seq, num_ranks, rank); }
  /// The same as rows.
  IndexRange rows(int rank) const {
    const IndexRange p = positions(rank);
    return {p.begin * batch, p.count * batch};
  }
  std::int64_t total_rows() const { return seq * batch; }
};

/// Equal, contiguous shards of the heads; schemes that need them refuse other numbers of ranks beforehand.
struct HeadShards {
  std::int64_t num_heads = 0;
  int num_ranks = 1;

  std::int64_t per_rank() const { return num_heads / num_ranks; }
  IndexRange heads(int rank) const { return {rank * per_rank(), per_rank()}; }
};

}  // namespace isomer
