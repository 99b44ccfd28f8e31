// A decode layout: how one copy of a model is spread over devices for decoding, its text form, and whether it fits. One
// value for all who have to do with it: the engine runs it (parallel/decode/), decode_bytes.h says what it sends, the
// planner prices it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cost/decode_bytes.h"
#include "model/config.h"

namespace isomer {

/// Text form (docs/planner.md, Layouts): an attention axis, then dp-ep, then pp, where they are more than one:
///   tp:8  gla:g=2,tp=4  tpla:g=2,tp=4  exact-latent:2  kvp:8  medha:kvp=4,tpa=1  helix:kvp=8,tpa=1,tpf=2,ep=4
///   dp-ep:32  tp:4,dp-ep:8  tp:8,ep=4,pp:2
struct DecodeLayout {
  DecodeShards shards;
  int pp = 1;         // stages; the batch passes in as many parts, so that all stages work
  bool hop_b = true;  // helix: the exchange of one part of the batch runs beside the attention of the next
  int stage_devices() const { return shards.devices(); }
  int devices() const { return shards.devices() * pp; }
  /// tp, gla, tpla, exact-latent, kvp, medha, helix, or dp-ep where every device has sequences of its own.
  std::string_view family() const;
};

std::string to_string(const DecodeLayout& layout);

/// Throws std::invalid_argument naming the axis or key, its value and what it takes. `config` decides what `dp-ep` cuts
/// its FFN by (experts, or columns in a dense model).
DecodeLayout parse_decode_layout(std::string_view text, const ModelConfig& config);

/// Kinds of reasons why a layout or a batch does not fit, in the order in which they are looked for.
enum class Unfit : std::uint8_t {
  fits,
  attention_kind,  // a latent is cut, and the model has none
  heads,           // do not divide by the devices that split them, or are fewer
  latent,          // does not divide by g
  experts,         // do not divide by EP, or EP in a dense model
  ffn_width,       // fewer columns than devices that split them
  ffn_devices,     // TPF · EP is not the number of attention devices
  layers,          // fewer than stages
  batch,           // does not divide by DP · PP
  context,         // shorter than the slices
  memory,          // weights, cache and workspace exceed the capacity
};
inline constexpr int kNumUnfit = 11;
/// "heads do not divide": for counts of omitted layouts.
std::string_view reason_of(Unfit unfit);

/// What of the model alone forbids the layout (all but batch, context and memory).
Unfit why_unfit(const DecodeLayout& layout, const ModelConfig& config);

}  // namespace isomer
