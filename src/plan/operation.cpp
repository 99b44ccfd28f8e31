#include "plan/operation.h"

#include "core/error.h"
#include "cost/inference_cost.h"
#include "cost/op_cost.h"

namespace isomer {

namespace {

/// Operands of activations travel in the compute precision, results in bf16 (f32 stays f32).
ElementBytes element_bytes(const Operation& op) {
  return {bytes_of(op.storage), bytes_of(op.compute), op.compute == Precision::f32 ? 4.0 : 2.0};
}

OpCost decode_cost(const Operation& op) {
  const bool mla = op.kind == OperationKind::decode_mla;
  const std::int64_t key = mla ? op.latent + op.rope : op.head_dim;
  const std::int64_t value = mla ? op.latent : op.head_dim;
  const std::int64_t row = mla ? key : 2 * op.kv_heads * op.head_dim;
  return decode_attention_cost({op.batch, op.heads, op.context, key, value, row}, element_bytes(op));
}

OpCost prefill_cost(const Operation& op) {
  const ElementBytes e = element_bytes(op);
  const std::int64_t value = op.value_dim > 0 ? op.value_dim : op.head_dim;
  const std::int64_t kv_heads = op.kv_heads > 0 ? op.kv_heads : op.heads;
  const auto rows = static_cast<double>(op.batch) * static_cast<double>(op.context);
  const auto q = rows * static_cast<double>(op.heads * op.head_dim) * e.in;
  const auto kv = rows * static_cast<double>(kv_heads * (op.head_dim + value)) * e.stored;
  OpCost cost = attention_forward_cost(op.heads, op.batch * causal_pairs(0, op.context, 0, op.context), op.head_dim,
                                       value, q + kv);
  cost.bytes_written = rows * static_cast<double>(op.heads * value) * e.out;
  return cost;
}

OpCost collective_cost(const Operation& op) {
  double sent = exchanged_bytes(op.devices, op.bytes);
  if (op.kind == OperationKind::all_reduce) sent *= 2;
  if (op.kind == OperationKind::send_receive) sent = op.bytes;
  return {0, sent, sent};
}

}  // namespace

double bytes_of(Precision precision) {
  static constexpr double kBytes[] = {4, 2, 1, 0.5625};
  return kBytes[static_cast<std::size_t>(precision)];
}

std::string_view name_of(OperationKind kind) {
  static constexpr std::string_view kNames[] = {
      "gemm",        "moe",        "decode_mla", "decode_gqa",     "prefill_mla", "prefill_gqa", "mla_bmm",
      "elementwise", "all_reduce", "all_gather", "reduce_scatter", "all_to_all",  "send_receive"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view name_of(Precision precision) {
  static constexpr std::string_view kNames[] = {"f32", "bf16", "fp8", "nvfp4"};
  return kNames[static_cast<std::size_t>(precision)];
}

bool is_collective(OperationKind kind) { return kind >= OperationKind::all_reduce; }

OpCost cost_of(const Operation& op) {
  switch (op.kind) {
    case OperationKind::gemm: return product_cost(1, op.m, op.n, op.k, element_bytes(op));
    case OperationKind::mla_bmm: return product_cost(op.heads, op.m, op.n, op.k, element_bytes(op));
    case OperationKind::moe:
      return experts_cost({op.m, op.k, op.n, op.experts, op.top_k, op.moe_tp, op.moe_ep}, element_bytes(op));
    case OperationKind::decode_mla:
    case OperationKind::decode_gqa: return decode_cost(op);
    case OperationKind::prefill_mla:
    case OperationKind::prefill_gqa: return prefill_cost(op);
    case OperationKind::elementwise: return {0, op.bytes, 0};
    default: return collective_cost(op);
  }
}

std::int64_t messages_of(const Operation& op) {
  if (!is_collective(op.kind) || op.devices <= 1) return 0;
  if (op.kind == OperationKind::send_receive) return 1;
  return (op.kind == OperationKind::all_reduce ? 2 : 1) * (op.devices - 1);
}

}  // namespace isomer
