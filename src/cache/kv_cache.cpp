#include "cache/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/elementwise.h"

namespace isomer {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check_options(const CacheOptions& o) {
  const auto least_one = [](std::string_view name, std::int64_t value) {
    if (value < 1) invalid_argument("cache: {} is {}, must be at least 1", name, value);
  };
  least_one("num_layers", o.num_layers);
  least_one("num_heads", o.row.num_heads);
  least_one("key_width", o.row.key_width);
  least_one("value_width", o.row.value_width);
  least_one("page_tokens", o.page_tokens);
  least_one("num_pages", o.num_pages);
  ISOMER_CHECK(o.slice >= 0 && o.slice < o.shards.num_slices, "slice {} of {}", o.slice, o.shards.num_slices);
  ISOMER_CHECK(!o.row.values_are_key_parts || (o.row.num_heads == 1 && o.row.value_width <= o.row.key_width),
               "latent rows: {} heads, values {} of {} columns", o.row.num_heads, o.row.value_width, o.row.key_width);
}

/// NaN in every element of rows, so that a reader of memory that nobody owns shows.
void poison_rows(const Tensor& rows) {
  if (rows.numel() == 0) return;
  visit_dtype(rows.dtype(), [&]<class T>() {
    std::fill_n(rows.data<T>(), rows.numel(), static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
  });
}

}  // namespace

std::int64_t pages_for(std::int64_t tokens, std::int64_t page_tokens, const CacheShards& shards) {
  return ceil_div(shards.count(0, tokens), page_tokens);
}

KvCache::KvCache(RankContext& ctx, const CacheOptions& options) : options_(options) {
  check_options(options_);
  const CacheRowShape& row = options_.row;
  const std::int64_t rows = options_.num_pages * options_.page_tokens;
  const auto pools = [&](std::string_view name, std::int64_t width) {  // in one piece, which is enough for huge pages
    return ctx.empty(name, MemoryClass::cache, options_.dtype, {options_.num_layers, rows, row.num_heads, width});
  };
  const bool latent = row.values_are_key_parts;
  const Tensor keys = pools(latent ? "latent cache" : "key cache", row.key_width);
  const Tensor values = latent ? Tensor() : pools("value cache", row.value_width);
  for (std::int64_t layer = 0; layer < options_.num_layers; ++layer) {
    keys_.push_back(keys.select(0, layer));
    values_.push_back(latent ? keys_.back().slice(2, 0, row.value_width) : values.select(0, layer));
  }
  for (std::int64_t page = options_.num_pages; page-- > 0;) free_.push_back(page);
}

int KvCache::add_sequence() {
  sequences_[next_id_] = {};
  return next_id_++;
}

const KvCache::Sequence& KvCache::find(int sequence) const {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) invalid_argument("cache: there is no sequence {}", sequence);
  return found->second;
}

std::int64_t KvCache::pages_of(int slice, std::int64_t length) const {
  return ceil_div(options_.shards.count(slice, length), options_.page_tokens);
}

void KvCache::check_room(std::span<const Growth> growth, int owner, int slice) const {
  std::int64_t used = 0, more = 0;
  for (const auto& [id, sequence] : sequences_) {
    if (id % options_.num_owners == owner) used += pages_of(slice, sequence.length);
  }
  for (const Growth& g : growth) {
    const std::int64_t length = find(g.sequence).length;
    if (g.sequence % options_.num_owners == owner) more += pages_of(slice, length + g.tokens) - pages_of(slice, length);
  }
  if (used + more <= options_.num_pages) return;
  std::int64_t tokens = 0, held = 0;
  for (const Growth& g : growth) tokens += g.tokens;
  for (const auto& [id, sequence] : sequences_) held += sequence.length;
  invalid_argument(
      "the cache is too small: {} more tokens beside {} in it need {} pages of {} tokens on slice {} of {}, there "
      "are {} pages; give it more tokens or ask for less",
      tokens, held, used + more, options_.page_tokens, slice, options_.shards.num_slices, options_.num_pages);
}

void KvCache::grow(std::span<const Growth> growth) {
  // Every owner and slice, not this one alone: all ranks must come to the same end.
  for (int owner = 0; owner < options_.num_owners; ++owner) {
    for (int slice = 0; slice < options_.shards.num_slices; ++slice) check_room(growth, owner, slice);
  }
  for (const Growth& g : growth) {
    Sequence& sequence = sequences_.at(g.sequence);
    sequence.length += g.tokens;
    if (!owns(g.sequence)) continue;
    const std::int64_t pages = pages_of(options_.slice, sequence.length);
    while (static_cast<std::int64_t>(sequence.pages.size()) < pages) {
      sequence.pages.push_back(free_.back());
      free_.pop_back();
    }
  }
}

void KvCache::release(RankContext& ctx, Sequence& sequence, std::int64_t kept_pages) {
  while (static_cast<std::int64_t>(sequence.pages.size()) > kept_pages) {
    const std::int64_t page = sequence.pages.back();
    sequence.pages.pop_back();
    free_.push_back(page);
    if (!ctx.memory().poison || ctx.dry_run()) continue;
    for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
      poison_rows(keys_[layer].slice(0, page * options_.page_tokens, options_.page_tokens));
      if (options_.row.values_are_key_parts) continue;
      poison_rows(values_[layer].slice(0, page * options_.page_tokens, options_.page_tokens));
    }
  }
}

void KvCache::remove_sequence(RankContext& ctx, int sequence) {
  find(sequence);
  release(ctx, sequences_.at(sequence), 0);
  sequences_.erase(sequence);
}

void KvCache::truncate(RankContext& ctx, int sequence, std::int64_t length) {
  if (length < 0 || length > find(sequence).length) {
    invalid_argument("cache: sequence {} has {} positions, it can't be cut to {}", sequence, find(sequence).length,
                     length);
  }
  Sequence& cut = sequences_.at(sequence);
  cut.length = length;
  release(ctx, cut, pages_of(options_.slice, length));
}

std::vector<TokenRun> KvCache::runs(int sequence, std::int64_t begin, std::int64_t end) const {
  const Sequence& s = find(sequence);
  ISOMER_CHECK(begin >= 0 && begin <= end && end <= s.length, "positions [{}, {}) of a sequence of {}", begin, end,
               s.length);
  std::vector<TokenRun> found;
  for (const IndexRange& range : options_.shards.ranges(options_.slice, begin, end)) {
    for (std::int64_t position = range.begin; position < range.end();) {
      const std::int64_t place = options_.shards.place(position), in_page = place % options_.page_tokens;
      const std::int64_t length = std::min(range.end() - position, options_.page_tokens - in_page);
      const std::int64_t page = s.pages.at(static_cast<std::size_t>(place / options_.page_tokens));
      found.push_back({.row = page * options_.page_tokens + in_page, .length = length, .position = position});
      position += length;
    }
  }
  return found;
}

std::vector<TokenRun> KvCache::packed_runs(int sequence, std::int64_t end) const {
  const Sequence& s = find(sequence);
  ISOMER_CHECK(end >= 0 && end <= s.length, "positions up to {} of a sequence of {}", end, s.length);
  const std::int64_t count = options_.shards.count(options_.slice, end);
  std::vector<TokenRun> found;
  for (std::int64_t place = 0; place < count; place += options_.page_tokens) {
    const std::int64_t row = s.pages.at(static_cast<std::size_t>(place / options_.page_tokens)) * options_.page_tokens;
    const std::int64_t length = std::min(options_.page_tokens, count - place);
    if (!found.empty() && found.back().row + found.back().length == row) {
      found.back().length += length;
    } else {
      found.push_back({.row = row, .length = length, .position = place});
    }
  }
  return found;
}

void KvCache::store(RankContext& ctx, std::int64_t layer, int sequence, std::int64_t begin, const Tensor& keys,
                    const Tensor& values) {
  for (const TokenRun& run : runs(sequence, begin, begin + keys.size(0))) {
    const std::int64_t from = run.position - begin;
    copy(ctx, "cache keys", keys.slice(0, from, run.length), this->keys(layer).slice(0, run.row, run.length));
    if (options_.row.values_are_key_parts) continue;
    copy(ctx, "cache values", values.slice(0, from, run.length), this->values(layer).slice(0, run.row, run.length));
  }
}

void KvCache::load(RankContext& ctx, std::int64_t layer, int sequence, std::int64_t begin, std::int64_t end,
                   const Tensor& keys, const Tensor& values) const {
  std::int64_t to = 0;
  for (const TokenRun& run : runs(sequence, begin, end)) {
    copy(ctx, "load keys", this->keys(layer).slice(0, run.row, run.length), keys.slice(0, to, run.length));
    if (!options_.row.values_are_key_parts) {
      copy(ctx, "load values", this->values(layer).slice(0, run.row, run.length), values.slice(0, to, run.length));
    }
    to += run.length;
  }
  ISOMER_CHECK(to == keys.size(0), "{} rows of [{}, {}) into {}", to, begin, end, keys.size(0));
}

}  // namespace isomer
