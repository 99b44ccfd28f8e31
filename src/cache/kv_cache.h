// The paged key/value cache of one rank. A layer has one pool of rows, cut into pages of a fixed number of tokens; a
// sequence's page table, one for all layers, is host metadata, so that a dry run has it too. A rank caches the
// positions of its slice only (sharding/cache_shards.h), packed one behind the other. Latent attention caches one row
// [ĉ | RoPE(k_pe)] a token; grouped-query attention keys and values of the rank's KV heads.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/rank_context.h"
#include "kernels/attention.h"
#include "sharding/cache_shards.h"

namespace isomer {

/// What one token's row is in one layer.
struct CacheRowShape {
  std::int64_t num_heads = 1;         // KV heads; 1 for latent rows
  std::int64_t key_width = 0;         // d + r, or head_dim
  std::int64_t value_width = 0;       // d, or head_dim
  bool values_are_key_parts = false;  // latent rows: the value is the key's first columns, and takes no memory

  std::int64_t elements() const { return num_heads * (key_width + (values_are_key_parts ? 0 : value_width)); }
};

struct CacheOptions {
  std::int64_t num_layers = 0, first_layer = 0;  // this rank's: [first_layer, first_layer + num_layers)
  CacheRowShape row;
  DType dtype = DType::f32;
  std::int64_t page_tokens = 64;
  std::int64_t num_pages = 0;
  CacheShards shards;
  int slice = 0;                  // this rank's
  int num_owners = 1, owner = 0;  // data parallelism: sequence i is cached by owner i mod num_owners alone
};

/// Pages that `tokens` positions of one sequence take on the slice that has most of them.
std::int64_t pages_for(std::int64_t tokens, std::int64_t page_tokens, const CacheShards& shards);

class KvCache {
 public:
  /// Allocates the pools, class `cache`. Throws std::invalid_argument for sizes below 1.
  KvCache(RankContext& ctx, const CacheOptions& options);

  const CacheOptions& options() const { return options_; }
  std::int64_t num_free_pages() const { return static_cast<std::int64_t>(free_.size()); }

  /// A new empty sequence's id.
  int add_sequence();
  /// Gives its pages back. Where the rank's memory record poisons, they are filled with NaN.
  void remove_sequence(RankContext& ctx, int sequence);
  /// Whether a sequence's rows are cached here, or by another owner.
  bool owns(int sequence) const { return sequence % options_.num_owners == options_.owner; }
  /// Positions that a sequence has, on all slices together.
  std::int64_t length(int sequence) const { return find(sequence).length; }

  struct Growth {
    int sequence;
    std::int64_t tokens;
  };
  /// Makes room for more positions at the end of sequences, of which each may stand once. Throws std::invalid_argument
  /// naming capacity and need where pages don't suffice on some slice, the same on every rank; nothing changes then.
  void grow(std::span<const Growth> growth);
  /// Forgets the positions from `length` on; their pages go back.
  void truncate(RankContext& ctx, int sequence, std::int64_t length);

  /// Rows of all positions in a layer's pool: keys [rows, num_heads, key_width], values [rows, num_heads, value_width].
  Tensor keys(std::int64_t layer) const { return keys_.at(static_cast<std::size_t>(layer - options_.first_layer)); }
  Tensor values(std::int64_t layer) const { return values_.at(static_cast<std::size_t>(layer - options_.first_layer)); }
  /// Where this slice's positions within [begin, end) stand in a pool, increasing; segment 0.
  std::vector<TokenRun> runs(int sequence, std::int64_t begin, std::int64_t end) const;

  /// Where this slice's positions of [0, end) stand, for a reader who sees all of them: as few runs as pages allow,
  /// whose positions are places among the slice's own (none beyond the true one).
  std::vector<TokenRun> packed_runs(int sequence, std::int64_t end) const;

  /// Stores the rows of the positions [begin, begin + rows) as far as this slice owns them. `keys` [rows, num_heads,
  /// key_width], `values` likewise, ignored for latent rows; rounded to the cache's type.
  void store(RankContext& ctx, std::int64_t layer, int sequence, std::int64_t begin, const Tensor& keys,
             const Tensor& values);
  /// Copies this slice's rows of positions within [begin, end) one behind the other: to keys [count, num_heads,
  /// key_width] and, unless values are parts of keys, values; in their types.
  void load(RankContext& ctx, std::int64_t layer, int sequence, std::int64_t begin, std::int64_t end,
            const Tensor& keys, const Tensor& values) const;

 private:
  struct Sequence {
    std::int64_t length = 0;
    std::vector<std::int64_t> pages;
  };
  const Sequence& find(int sequence) const;
  /// Throws where an owner's pages on a slice don't suffice.
  void check_room(std::span<const Growth> growth, int owner, int slice) const;
  /// Pages that `length` positions take on a slice.
  std::int64_t pages_of(int slice, std::int64_t length) const;
  void release(RankContext& ctx, Sequence& sequence, std::int64_t kept_pages);

  CacheOptions options_;
  std::vector<Tensor> keys_, values_;
  std::vector<std::int64_t> free_;  // the last is handed out next
  std::map<int, Sequence> sequences_;
  int next_id_ = 0;
};

}  // namespace isomer
