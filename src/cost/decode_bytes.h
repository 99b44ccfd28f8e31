// Closed forms of one decode step of one layer: what a device sends, and what it caches, for every way of spreading the
// step over devices (docs/planner.md, Layouts). The only owner of these formulas: the planner prices them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace isomer {

/// How the attention of one group of devices is cut.
enum class DecodeScheme : std::uint8_t { tp, gla, tpla, exact_latent, kvp, medha, helix };
std::string_view name_of(DecodeScheme scheme);

/// One attention group of kvp·tpa devices, `data_parallel` such groups with sequences of their own, and the FFN over
/// all of them as tpf·ep devices. `dp-ep:32` is a group of one device, 32 times.
struct DecodeShards {
  DecodeScheme scheme = DecodeScheme::tp;
  int kvp = 1;              // slices of the sequence: kvp, medha, helix
  int tpa = 1;              // devices that split the heads (tp, gla, tpla, medha, helix) or the latent (exact-latent)
  std::int64_t chunk = 16;  // tokens of the cache dealt to a slice at once: kvp, medha, helix
  int latent_shards = 1;    // g of gla, tpla, exact-latent: divides tpa
  int data_parallel = 1;
  int tpf = 1, ep = 1;
  std::int64_t shared_columns = 0;  // tpla: leading latent columns that stand on every device

  bool gather_queries = false;     // helix: q=gather, else every slice projects all its heads' queries
  bool absorb_before = false;      // with q=gather: absorbed queries travel (d + r), else n + r
  bool values_before = false;      // MLA: W_UV before the exchange (v a head), else the latent travels (d a head)
  bool gather_experts = false;     // helix, MoE: the experts' results joined by a gather, else by an all-reduce
  bool whole_rope = true;          // exact-latent: k_pe whole on every device, else cut as well
  bool split_latent_rows = false;  // tpla: W_kv_a cut, the RMS made exact by one all-reduced scalar
  bool scatter_values = false;     // tpla with g = N: values reduce-scattered by head, W_o by heads

  int group() const { return kvp * tpa; }
  int devices() const { return group() * data_parallel; }
  bool operator==(const DecodeShards&) const = default;
  bool is_exact() const { return scheme != DecodeScheme::gla && scheme != DecodeScheme::tpla; }
};

enum class DecodeCollective : std::uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, send };

/// Where in the layer an exchange stands. Helix's exchange of one request may run beside the next one's attention.
enum class DecodeStage : std::uint8_t { before_core, partials, output };

/// One exchange of a step, in elements: those that travel in the activations' precision, and float32 statistics.
struct DecodeTransfer {
  std::string_view name;
  DecodeCollective collective = DecodeCollective::all_reduce;
  DecodeStage stage = DecodeStage::output;
  int devices = 1;
  int span = 0;                       // devices they are spread over, where they are no neighbours
  double sent = 0, sent_f32 = 0;      // by this device to others
  double buffer = 0, buffer_f32 = 0;  // all_reduce, reduce_scatter, all_to_all: what it holds before; all_gather: after
  double bytes_sent(double element_bytes) const { return sent * element_bytes + 4 * sent_f32; }
  double buffer_bytes(double element_bytes) const { return buffer * element_bytes + 4 * buffer_f32; }
};

/// At most eight, without an allocation: the planner asks for them hundreds of thousands of times.
class DecodeTransfers {
 public:
  /// Nothing is entered that involves one device alone. `span`: as in DecodeTransfer.
  void add(const DecodeTransfer& transfer, int span = 0);
  const DecodeTransfer* begin() const { return items_.data(); }
  const DecodeTransfer* end() const { return items_.data() + count_; }
  double bytes_sent(double element_bytes) const;

 private:
  std::array<DecodeTransfer, 8> items_;
  std::size_t count_ = 0;
};

/// Exchanges of one layer's attention. `batch`: new tokens of one attention group; `context`: cached tokens a sequence;
/// `device`: index in the group, slice · tpa + column. Uneven shards of heads and elements are dealt like TokenShards.
DecodeTransfers decode_attention_transfers(const ModelConfig& config, const DecodeShards& shards, std::int64_t batch,
                                           std::int64_t context, int device = 0);

/// Rows of one layer that go to experts on other devices (a row counts once for each) and that come from them, under
/// data parallelism and one given routing.
struct RoutedRows {
  double sent = 0, received = 0;
};

/// Exchanges of one layer's FFN. `batch`: new tokens of all groups together, dealt to them as evenly as they go;
/// `device`: index in its group, under data parallelism among all devices. Dispatched and combined tokens are those of
/// `routed`, or without it what uniform routing sends on average.
DecodeTransfers decode_ffn_transfers(const ModelConfig& config, const DecodeShards& shards, bool moe_layer,
                                     std::int64_t batch, int device = 0, const RoutedRows* routed = nullptr);

/// How many rows of `experts` [rows, experts_per_token] have an expert on each of `devices` devices, which have
/// neighbouring experts, as many each.
std::vector<std::int64_t> rows_by_device(std::span<const std::int32_t> experts, std::int64_t experts_per_token,
                                         std::int64_t num_experts, int devices);

/// Elements that cross a boundary of pipeline stages: the hidden state, once over the devices of a stage.
double pipeline_elements(const ModelConfig& config, std::int64_t batch);

/// Cache elements of one token of one layer on one device, averaged over the slices that it may fall to.
double decode_cache_elements(const ModelConfig& config, const DecodeShards& shards);

/// Devices beside its own that a token's experts lie on, uniform routing: (N−1)(1 − C(E−E/N, k)/C(E, k)).
double expected_other_devices(std::int64_t experts, std::int64_t experts_per_token, std::int64_t devices);

}  // namespace isomer
