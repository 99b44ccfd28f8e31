// What the planner prices: one operation of one device, described by its shape. FLOPs and bytes come from src/cost; how
// long it takes on a given device is the business of hardware.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/record.h"

namespace isomer {

/// Element types that hardware computes in and memory holds. nvfp4 takes 0.5625 bytes: 4 bits and an FP8 scale per 16.
enum class Precision : std::uint8_t { f32, bf16, fp8, nvfp4 };
double bytes_of(Precision precision);

enum class OperationKind : std::uint8_t {
  gemm,  // c[m, n] = a[m, k]·b[k, n]; b holds the weights
  // The routed experts' FFN on one of moe_tp × moe_ep devices. m: tokens that enter the layer, of all devices that
  // share it and before routing; each visits top_k of `experts`; this device holds experts / moe_ep of them, each of
  // `n` intermediate columns over all moe_tp devices (n is of the model, not yet divided).
  moe,
  decode_mla,   // absorbed decode attention: batch b, heads h over a cache of `context` latent rows
  decode_gqa,   // decode attention: batch b, h query heads, kv_heads, head_dim, context
  prefill_mla,  // causal attention of b sequences of `context` tokens, key width ≠ value width
  prefill_gqa,
  mla_bmm,         // products with W_UK or W_UV: h products of [m, k]·[k, n]
  elementwise,     // bound by bytes
  all_reduce,      // bytes = the whole buffer of one device
  all_gather,      // bytes = what one device ends up with
  reduce_scatter,  // bytes = the whole buffer of one device
  all_to_all,      // bytes = what one device holds before it
  send_receive,    // bytes = one message
};
std::string_view name_of(OperationKind kind);
std::string_view name_of(Precision precision);
bool is_collective(OperationKind kind);

/// Fields that a kind does not use stay 0.
struct Operation {
  OperationKind kind = OperationKind::gemm;
  std::string name;                  // in breakdowns: "q_b_proj", "exchange"
  std::int64_t m = 0, n = 0, k = 0;  // gemm, mla_bmm; moe: m tokens, n intermediate, k hidden
  std::int64_t batch = 0, heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0, context = 0;  // attention
  std::int64_t latent = 0, rope = 0;                            // mla: kv_lora_rank, qk_rope_head_dim
  std::int64_t experts = 0, top_k = 0, moe_tp = 1, moe_ep = 1;  // moe: experts of the layer, devices it is cut over
  double bytes = 0;                                             // elementwise (read + written), collectives
  int devices = 1;                                              // of a collective
  int span = 0;  // devices that those are spread over, 0: they are neighbours; decides which link they use
  Precision compute = Precision::bf16;  // operands
  Precision storage = Precision::bf16;  // weights of a gemm or moe, cache of an attention, elements of a collective
  std::int64_t count = 1;               // so many of them, one after another
  int reach() const { return span > devices ? span : devices; }
};

/// FLOPs and the bytes of device memory that ONE of the `count` repetitions reads and writes at least, by the formulas
/// of src/cost. Collectives: no FLOPs; bytes_read and bytes_written are what a device sends and receives (the direct
/// algorithm, closed-forms of docs/communication.md).
OpCost cost_of(const Operation& operation);

/// Messages that a device sends to others in ONE of the repetitions, by the direct algorithm: N − 1 of a collective,
/// twice that of an all-reduce, 1 of a send. 0 of what is no collective, and among one device.
std::int64_t messages_of(const Operation& operation);

}  // namespace isomer
