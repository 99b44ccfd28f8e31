#include "infer/hand_over.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/elementwise.h"

namespace isomer {

namespace {

constexpr std::int64_t kBlock = 2048;  // positions that travel at once

/// What a rank has of a row: columns, or KV heads.
std::vector<IndexRange> units_of(const ModelConfig& config, const RankCache& cache) {
  if (config.attention == AttentionKind::gqa) return {cache.kv_heads};
  return cache.columns;
}
/// The axis of cached keys and values that units are counted along.
int unit_axis(const ModelConfig& config) { return config.attention == AttentionKind::gqa ? 1 : 2; }

bool has_range(const std::vector<IndexRange>& units, IndexRange range) {
  return std::any_of(units.begin(), units.end(),
                     [&](const IndexRange& u) { return u.begin <= range.begin && range.end() <= u.end(); });
}

/// Cuts `range` where any of the senders' ranges begins or ends, so that each part stands whole on some rank.
std::vector<IndexRange> cut_at_bounds(IndexRange range, const std::vector<std::vector<IndexRange>>& senders) {
  std::vector<std::int64_t> bounds = {range.begin, range.end()};
  for (const auto& units : senders) {
    for (const IndexRange& u : units) {
      for (const std::int64_t bound : {u.begin, u.end()}) {
        if (bound > range.begin && bound < range.end()) bounds.push_back(bound);
      }
    }
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  std::vector<IndexRange> parts;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) parts.push_back({bounds[i], bounds[i + 1] - bounds[i]});
  return parts;
}

/// Where a global range of units stands among a rank's own, which lie one behind the other.
std::int64_t place_of(const std::vector<IndexRange>& units, IndexRange range) {
  std::int64_t place = 0;
  for (const IndexRange& u : units) {
    if (u.begin <= range.begin && range.end() <= u.end()) return place + range.begin - u.begin;
    place += u.count;
  }
  ISOMER_CHECK(false, "units [{}, {}) are not in this cache", range.begin, range.end());
  return 0;
}

std::int64_t count_of(const std::vector<IndexRange>& units) {
  std::int64_t count = 0;
  for (const IndexRange& u : units) count += u.count;
  return count;
}

/// Positions in [begin, end) that both slices have.
std::vector<IndexRange> common_positions(const RankCache& a, const RankCache& b, std::int64_t begin, std::int64_t end) {
  std::vector<IndexRange> common;
  for (const IndexRange& range : a.shards.ranges(a.slice, begin, end)) {
    for (const IndexRange& part : b.shards.ranges(b.slice, range.begin, range.end())) common.push_back(part);
  }
  return common;
}

/// One move of cached keys (or values) of a layer.
class Move {
 public:
  Move(RankContext& ctx, Communicator& comm, const ModelConfig& config, const CacheGroup& from, const CacheGroup& to)
      : ctx_(ctx), comm_(comm), config_(config), from_(from), to_(to) {
    for (int slice = 0; slice < from.layout.shards.kvp; ++slice) {
      for (CachePiece& piece : hand_over_pieces(config, from, slice, to)) pieces_.push_back(std::move(piece));
    }
  }

  /// Rows [begin, end): `mine` has this sender's, in order; `rows` [end − begin, …] gets this receiver's.
  void run(std::string_view name, IndexRange block, const Tensor& mine, const Tensor& rows, const Shape& unit_row,
           DType dtype) {
    std::vector<Tensor> send, receive;
    for (int rank = 0; rank < comm_.size(); ++rank) {
      send.push_back(pack(name, piece(comm_.rank(), rank), block, mine, unit_row, dtype));
      receive.push_back(room(name, piece(rank, comm_.rank()), block, unit_row, dtype));
    }
    comm_.all_to_all(name, send, receive);
    for (int rank = 0; rank < comm_.size(); ++rank) {
      if (const CachePiece* p = piece(rank, comm_.rank())) unpack(name, *p, block, receive[at(rank)], rows);
    }
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  const CachePiece* piece(int from, int to) const {
    const auto found =
        std::find_if(pieces_.begin(), pieces_.end(), [&](const CachePiece& p) { return p.from == from && p.to == to; });
    return found == pieces_.end() ? nullptr : &*found;
  }
  RankCache cache_of(const CacheGroup& group, int rank) const {
    return rank_cache_of(group.layout, config_, rank - group.first_rank);
  }
  std::vector<IndexRange> positions_of(const CachePiece& p, IndexRange block) const {
    return common_positions(cache_of(from_, p.from), cache_of(to_, p.to), block.begin, block.end());
  }
  Tensor room(std::string_view name, const CachePiece* p, IndexRange block, Shape shape, DType dtype) {
    shape[0] = p == nullptr ? 0 : count_of(positions_of(*p, block));
    if (p != nullptr) shape[static_cast<std::size_t>(unit_axis(config_))] = count_of(p->units);
    return ctx_.empty(name, MemoryClass::communication, dtype, shape);
  }
  Tensor pack(std::string_view name, const CachePiece* p, IndexRange block, const Tensor& mine, const Shape& unit_row,
              DType dtype) {
    Tensor packed = room(name, p, block, unit_row, dtype);
    if (p == nullptr) return packed;
    const RankCache source = cache_of(from_, p->from);
    const std::vector<IndexRange> units = units_of(config_, source);
    const std::int64_t first = source.shards.count(source.slice, block.begin);
    std::int64_t row = 0;
    for (const IndexRange& range : positions_of(*p, block)) {
      const std::int64_t place = source.shards.place(range.begin) - first;
      std::int64_t unit = 0;
      for (const IndexRange& u : p->units) {
        copy(ctx_, "pack cache",
             mine.slice(0, place, range.count).slice(unit_axis(config_), place_of(units, u), u.count),
             packed.slice(0, row, range.count).slice(unit_axis(config_), unit, u.count));
        unit += u.count;
      }
      row += range.count;
    }
    return packed;
  }
  void unpack(std::string_view name, const CachePiece& p, IndexRange block, const Tensor& packed, const Tensor& rows) {
    const std::vector<IndexRange> units = units_of(config_, cache_of(to_, p.to));
    std::int64_t row = 0;
    for (const IndexRange& range : positions_of(p, block)) {
      std::int64_t unit = 0;
      for (const IndexRange& u : p.units) {
        copy(ctx_, name, packed.slice(0, row, range.count).slice(unit_axis(config_), unit, u.count),
             rows.slice(0, range.begin - block.begin, range.count)
                 .slice(unit_axis(config_), place_of(units, u), u.count));
        unit += u.count;
      }
      row += range.count;
    }
  }

  RankContext& ctx_;
  Communicator& comm_;
  const ModelConfig& config_;
  const CacheGroup &from_, &to_;
  std::vector<CachePiece> pieces_;
};

/// A sender's rows, and room for a receiver's, of one block.
struct BlockRows {
  Tensor keys, values;
};
BlockRows make_rows(RankContext& ctx, const CacheRowShape& row, std::int64_t count, DType dtype) {
  BlockRows rows;
  rows.keys = ctx.empty("cache keys", MemoryClass::workspace, dtype, {count, row.num_heads, row.key_width});
  if (row.values_are_key_parts) return rows;
  rows.values = ctx.empty("cache values", MemoryClass::workspace, dtype, {count, row.num_heads, row.value_width});
  return rows;
}

/// The senders' type, which receivers don't know.
DType sender_dtype(Communicator& comm, const CacheSequence& source) {
  const int mine = source.cache == nullptr ? 0 : static_cast<int>(source.cache->options().dtype);
  return static_cast<DType>(static_cast<int>(comm.max_over_ranks(mine)));
}

}  // namespace

std::vector<CachePiece> hand_over_pieces(const ModelConfig& config, const CacheGroup& from, int slice,
                                         const CacheGroup& to) {
  std::vector<int> holders;
  std::vector<std::vector<IndexRange>> held;
  for (int rank = 0; rank < from.layout.devices(); ++rank) {
    const RankCache cache = rank_cache_of(from.layout, config, rank);
    if (cache.slice != slice) continue;
    holders.push_back(from.first_rank + rank);
    held.push_back(units_of(config, cache));
  }
  std::vector<CachePiece> pieces;
  for (int rank = to.first_rank; rank < to.end_rank(); ++rank) {
    std::vector<CachePiece> mine;
    for (const IndexRange& need : units_of(config, rank_cache_of(to.layout, config, rank - to.first_rank))) {
      for (const IndexRange& part : cut_at_bounds(need, held)) {
        std::vector<int> able;
        for (std::size_t i = 0; i < holders.size(); ++i) {
          if (has_range(held[i], part)) able.push_back(holders[i]);
        }
        ISOMER_CHECK(!able.empty(), "units [{}, {}) stand nowhere", part.begin, part.end());
        const bool own = std::find(able.begin(), able.end(), rank) != able.end();
        const int sender = own ? rank : able[static_cast<std::size_t>(rank - to.first_rank) % able.size()];
        auto found = std::find_if(mine.begin(), mine.end(), [&](const CachePiece& p) { return p.from == sender; });
        if (found == mine.end()) found = mine.insert(mine.end(), {sender, rank, {}});
        found->units.push_back(part);
      }
    }
    pieces.insert(pieces.end(), mine.begin(), mine.end());
  }
  return pieces;
}

void hand_over_cache(RankContext& ctx, Communicator& comm, const ModelConfig& config, std::int64_t length,
                     const CacheGroup& from, const CacheSequence& source, const CacheGroup& to,
                     const CacheSequence& target) {
  const bool sends = from.has(comm.rank()), receives = to.has(comm.rank());
  ISOMER_CHECK(sends == (source.cache != nullptr) && receives == (target.cache != nullptr),
               "a rank of a group has its cache");
  const PhaseScope phase(ctx, Phase::forward);
  if (receives) {
    const KvCache::Growth growth{target.sequence, length};
    target.cache->grow({&growth, 1});
  }
  const DType dtype = sender_dtype(comm, source);
  const bool latent = config.attention == AttentionKind::mla;
  const Shape unit_row = {0, latent ? 1 : 0, latent ? 0 : config.head_dim};
  Move move(ctx, comm, config, from, to);
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (std::int64_t begin = 0; begin < length; begin += kBlock) {
      const IndexRange block{begin, std::min(kBlock, length - begin)};
      BlockRows mine, rows;
      if (sends) {
        const CacheOptions& o = source.cache->options();
        mine = make_rows(ctx, o.row, o.shards.count(o.slice, block.end()) - o.shards.count(o.slice, begin), dtype);
        source.cache->load(ctx, layer, source.sequence, begin, block.end(), mine.keys, mine.values);
      }
      if (receives) rows = make_rows(ctx, target.cache->options().row, block.count, dtype);
      move.run("cache keys", block, mine.keys, rows.keys, unit_row, dtype);
      if (!latent) move.run("cache values", block, mine.values, rows.values, unit_row, dtype);
      if (receives) target.cache->store(ctx, layer, target.sequence, begin, rows.keys, rows.values);
    }
  }
}

std::string why_hand_over_unfit(const ModelConfig& config, const CacheGroup& from, const CacheGroup& to, int num_ranks,
                                const TplaModel* tpla) {
  for (const CacheGroup* group : {&from, &to}) {
    std::string reason = why_step_unfit(group->layout, config, tpla);
    if (group->layout.pp > 1) reason = "a cache whose layers lie on several stages is not handed over; leave out pp";
    if (group->layout.shards.data_parallel > 1)
      reason = "sequences of one rank alone are not handed over; leave out dp-ep";
    if (!reason.empty()) {
      return fmt::format("{} layout '{}': {}", group == &from ? "prefill" : "decode", to_string(group->layout), reason);
    }
  }
  const bool apart = from.end_rank() <= to.first_rank || to.end_rank() <= from.first_rank;
  const bool together = from.first_rank == to.first_rank;
  if (!apart && !together) {
    return fmt::format(
        "prefill '{}' on ranks {} to {} and decode '{}' on ranks {} to {} overlap in part: groups lie "
        "apart, or begin at the same rank",
        to_string(from.layout), from.first_rank, from.end_rank() - 1, to_string(to.layout), to.first_rank,
        to.end_rank() - 1);
  }
  const int needed = std::max(from.end_rank(), to.end_rank());
  if (needed != num_ranks) {
    return fmt::format("prefill '{}' ({} ranks) and decode '{}' ({} ranks) {} need {} ranks, there are {}",
                       to_string(from.layout), from.layout.devices(), to_string(to.layout), to.layout.devices(),
                       apart ? "apart" : "on the same ranks", needed, num_ranks);
  }
  return {};
}

}  // namespace isomer
