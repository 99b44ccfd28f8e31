// Which rank owns which tokens and which heads: pure index maps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

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

/// Two-level shards of a batch of equally long sequences. A sequence is dealt over outer groups in zigzag order: of
/// 2·num_groups balanced parts, group g has parts g and 2·num_groups − 1 − g, so that causal work is balanced; one
/// group has all of it. A group's tokens, in order of position, are dealt contiguously over its inner ranks. rank =
/// group · ranks_per_group + index in the group.
///
/// Rows are sequence-major: the i-th token that somebody holds, of sequence b, is its row i·batch + b, so that what
/// goes to a peer is contiguous whatever the batch is. A rank's local rows and a group's gathered rows follow this
/// order.
struct TokenShards {
  std::int64_t seq = 0;
  std::int64_t batch = 1;
  int ranks_per_group = 1;
  int num_groups = 1;

  int num_ranks() const { return ranks_per_group * num_groups; }
  int group_of(int rank) const { return rank / ranks_per_group; }
  int index_in_group(int rank) const { return rank % ranks_per_group; }
  std::int64_t total_rows() const { return seq * batch; }

  /// Positions of `group`: one or two ranges, increasing; none if it has no tokens.
  std::vector<IndexRange> group_positions(int group) const;
  /// Positions of `rank`: its part of the group's.
  std::vector<IndexRange> positions(int rank) const;
  /// Tokens of a sequence that the group, the rank has.
  std::int64_t group_count(int group) const;
  std::int64_t count(int rank) const { return tokens_in_group(index_in_group(rank), group_of(rank)).count; }
  /// The same as rows of all sequences.
  std::int64_t group_rows(int group) const { return group_count(group) * batch; }
  std::int64_t rows(int rank) const { return count(rank) * batch; }
  /// Rows of inner rank `index` within its group's gathered rows.
  IndexRange rows_in_group(int index, int group) const {
    const IndexRange tokens = tokens_in_group(index, group);
    return {tokens.begin * batch, tokens.count * batch};
  }

 private:
  IndexRange tokens_in_group(int index, int group) const {
    return balanced_part(group_count(group), ranks_per_group, index);
  }
};

/// Query heads and the KV heads that they use, in equal groups.
struct HeadCut {
  IndexRange query, kv;
};

/// Part `part` of `parts` of the heads, each with at least one query head (parts ≤ num_heads). As long as there are KV
/// heads enough they are dealt with all their query heads (9 query and 3 KV heads over 2: 6 with 2, and 3 with 1);
/// beyond that each KV head stands on several parts, neighbours, over which its query heads are dealt. num_kv_heads
/// divides num_heads; latent attention has as many.
inline HeadCut grouped_heads(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t parts, std::int64_t part) {
  const std::int64_t group = num_heads / num_kv_heads;
  if (parts <= num_kv_heads) {
    const IndexRange kv = balanced_part(num_kv_heads, parts, part);
    return {{kv.begin * group, kv.count * group}, kv};
  }
  std::int64_t head = 0;
  while (balanced_part(parts, num_kv_heads, head).end() <= part) ++head;
  const IndexRange copies = balanced_part(parts, num_kv_heads, head);
  const IndexRange query = balanced_part(group, copies.count, part - copies.begin);
  return {{head * group + query.begin, query.count}, {head, 1}};
}

/// Equal, contiguous shards of the heads; schemes that need them refuse other numbers of ranks beforehand.
struct HeadShards {
  std::int64_t num_heads = 0;
  int num_ranks = 1;

  std::int64_t per_rank() const { return num_heads / num_ranks; }
  IndexRange heads(int rank) const { return {rank * per_rank(), per_rank()}; }
};

/// KV heads of grouped-query attention, spread together with the query heads that use them. Every rank must have the KV
/// heads of its query heads in equal groups, so lcm(KV heads, ranks) are spread: each KV head stands copies() times,
/// copies being neighbours. Without copies where the ranks divide the KV heads; where it is the other way round, one a
/// rank.
struct KvHeadShards {
  std::int64_t num_kv_heads = 0;
  int num_ranks = 1;

  std::int64_t with_copies() const { return std::lcm(num_kv_heads, static_cast<std::int64_t>(num_ranks)); }
  std::int64_t copies() const { return with_copies() / num_kv_heads; }
  std::int64_t per_rank() const { return with_copies() / num_ranks; }
  /// Of the rank's first head, the KV head that it is a copy of.
  std::int64_t kv_head(int rank) const { return rank * per_rank() / copies(); }
};

}  // namespace isomer
