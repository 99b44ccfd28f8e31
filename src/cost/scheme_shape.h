// What a training scheme does on one rank, as the closed forms of its work and memory see it: how many rows and heads
// it has, what it gathers, keeps and rebuilds. Inside src/cost.
#pragma once

#include <string>
#include <vector>

#include "cost/scheme_bytes.h"
#include "sharding/sequence_layout.h"

namespace isomer {

/// How keys and values stand between forward and backward.
enum class KeptKeys : std::uint8_t {
  whole,    // K [rows, heads, key], V [rows, heads, value]
  view,     // K whole, V a view of the up-projection's output, which stays
  strided,  // the up-projection's output alone, gradients in place
  rebuilt,  // neither: up-projected again in the backward
  latent,   // the gathered latent itself (absorbed)
  blocks    // rebuilt block by block in forward and backward (latent-gather, latent-ring)
};

struct SchemeShape {
  /// Throws std::invalid_argument for a scheme without closed forms of its work.
  SchemeShape(const SchemeCase& block, int rank);

  const ModelConfig& c;
  SequenceLayout layout;
  TokenShards tokens;
  int rank, group;
  bool grouped_query, rope_apart = false;
  bool gathers_latent = false, gathers_rope = false;  // inside the group
  bool recomputes_attention, recomputes_block;
  KeptKeys keys = KeptKeys::whole;
  int exchanges = 0;              // collectives inside the group, forward; as many backward
  bool gathers_outside = false;   // latent-gather: one all-gather over the groups, one reduce-scatter
  int passing = 0;                // tensors that pass round the groups
  bool keeps_built_keys = false;  // latent-gather:kv=kept
  std::int64_t block_rows = 0;    // KeptKeys::blocks: rows that are rebuilt at a time

  double own_rows, group_rows, all_rows, heads, own_heads, inner, groups;
  double kv_heads, own_kv_heads, kv_copies;  // grouped-query; copies included in own_kv_heads
  double key, value;                         // widths of the core, rope columns included
  double hidden, query_width, value_head;    // D, h·(n + r), v or head_dim
  double latent, rope, nope, q_lora;         // d, r, n
  double element, statistic;                 // bytes

  bool is_absorbed() const { return keys == KeptKeys::latent; }
  bool rebuilds_blocks() const { return keys == KeptKeys::blocks; }
  bool writes_in_place() const { return keys == KeptKeys::strided || (keys == KeptKeys::rebuilt && groups == 1); }
  bool passes_keys() const { return passing == 2; }
  /// Elements a row that pass round.
  double passing_width() const;
  double rows_of(int g) const { return static_cast<double>(tokens.group_rows(g)); }
  /// The group whose block is here at a step of the ring.
  int group_at(int step) const {
    return ((group - step) % layout.outer_groups + layout.outer_groups) % layout.outer_groups;
  }
  /// Query–key pairs of the group's queries, all sequences.
  std::int64_t pairs() const;
};

/// A part of the keys as a rank meets it, in order: a whole group's, or a block of rows that is rebuilt.
struct KeyPart {
  int step = 0;            // of the ring
  double rows = 0;         // of keys
  double seeing_rows = 0;  // of queries that see any of it; 0: hidden
};
std::vector<KeyPart> key_parts(const SchemeShape& shape);

}  // namespace isomer
