// What one device does in one decode step under a layout: operations to be priced, and memory.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cost/decode_layout.h"
#include "plan/hardware.h"

namespace isomer {

struct DecodePrecisions {
  Precision weights = Precision::bf16;
  Precision cache = Precision::bf16;
  Precision activations = Precision::bf16;  // of what travels between devices
};

/// Of the router, for weights stored so: BF16 at the narrowest, as checkpoints with narrow experts keep it.
inline Precision router_precision(Precision weights) { return std::min(weights, Precision::bf16); }

/// What stays the same over a search.
struct DecodeProblem {
  ModelConfig config;
  std::int64_t context = 0;  // cached tokens a sequence
  DecodePrecisions precision;
  double memory_limit_bytes = 0;  // of a device; 0: the description's capacity
  double reserved_share = 0.05;   // of the capacity, for the runtime and fragmentation
};

/// Weights of one device, in elements of one layer (norms included) and of the step's ends.
struct DecodeWeights {
  double attention = 0;  // one layer, input norm included
  double dense_ffn = 0;  // one layer, its norm included
  double moe_ffn = 0;    // one layer, its norm included
  double router = 0;     // of that
  double embedding = 0, head = 0;
};
DecodeWeights decode_weights(const ModelConfig& config, const DecodeShards& shards);

/// Layers of the heaviest stage.
struct StageLayers {
  std::int64_t dense = 0, moe = 0;
};
StageLayers stage_layers(const ModelConfig& config, int stages);

/// Bytes of one device at `batch` sequences over the whole layout.
struct DecodeMemory {
  double weights = 0, cache = 0, workspace = 0, reserved = 0;
  double total() const { return weights + cache + workspace + reserved; }
};
DecodeMemory decode_memory(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                           std::int64_t batch);

/// Whether layout and batch fit; the model's part is why_unfit's.
Unfit why_batch_unfit(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                      std::int64_t batch);

/// The operations of one step, in parts that repeat. `core` runs per part of the batch under HOP-B, beside `exchange`.
struct DecodeOperations {
  std::vector<Operation> attention;  // one layer's, without the two below
  std::vector<Operation> core;       // attention itself, and W_UV where it stands before the exchange
  std::vector<Operation> exchange;   // partial results between slices
  std::vector<Operation> dense_ffn, moe_ffn;
  std::vector<Operation> ends;      // once a step: output head
  std::vector<Operation> boundary;  // once a boundary of pipeline stages
  void clear();
};
/// Fill `out` (kept between calls, so that a search allocates nothing). The busiest device: slice 0. Attention depends
/// on the attention axes and on the tokens of a group alone; the rest on the FFN's axes and on all tokens.
void decode_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                       std::int64_t batch, DecodeOperations& out);
void decode_attention_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                                 std::int64_t batch, DecodeOperations& out);
void decode_ffn_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                           std::int64_t batch, DecodeOperations& out);

}  // namespace isomer
