#include "plan/decode_operations.h"

#include "core/error.h"
#include "plan/curves.h"
#include "plan/decode_cut.h"

namespace isomer {

namespace {

OperationKind kind_of(DecodeCollective collective) {
  switch (collective) {
    case DecodeCollective::all_reduce: return OperationKind::all_reduce;
    case DecodeCollective::all_gather: return OperationKind::all_gather;
    case DecodeCollective::reduce_scatter: return OperationKind::reduce_scatter;
    case DecodeCollective::all_to_all: return OperationKind::all_to_all;
    case DecodeCollective::send: return OperationKind::send_receive;
  }
  return OperationKind::send_receive;
}

OperationKind core_kind(const ModelConfig& config) {
  return config.attention == AttentionKind::mla ? OperationKind::decode_mla : OperationKind::decode_gqa;
}

/// What attention over a cache of this precision multiplies in: the narrowest in which a kernel was measured, over such
/// a cache or one of its own; BF16, as kernels that widen a narrow cache do, where none was. A roofline takes the
/// device's narrowest, as published analyses do.
Precision attention_compute(const Hardware& hardware, OperationKind kind, Precision cache) {
  const Precision narrow = hardware.compute_precision(cache);
  if (hardware.roofline || narrow <= Precision::bf16) return narrow;
  for (int p = static_cast<int>(narrow); p > static_cast<int>(Precision::bf16); --p) {
    const auto compute = static_cast<Precision>(p);
    const auto measured = [&](Precision storage) {
      return hardware.curves->find(kind, compute, storage, hardware.expert_load).exact;
    };
    if (measured(cache) || measured(compute)) return compute;
  }
  return Precision::bf16;
}

/// Builds the operations of one step.
class Builder {
 public:
  Builder(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout, std::int64_t batch,
          DecodeOperations& out)
      : c_(problem.config),
        problem_(problem),
        s_(layout.shards),
        cut_(decode_cut(problem.config, layout.shards)),
        all_tokens_(batch / layout.pp),
        tokens_(all_tokens_ / layout.shards.data_parallel),
        weights_(problem.precision.weights),
        weights_compute_(hardware.compute_precision(problem.precision.weights)),
        router_compute_(hardware.compute_precision(router_precision(problem.precision.weights))),
        core_compute_(attention_compute(hardware, core_kind(problem.config), problem.precision.cache)),
        travelling_(problem.precision.activations),
        partials_(hardware.exchange_precision.value_or(travelling_)),
        out_(out) {}

  void attention() {
    const auto transfers = decode_attention_transfers(c_, s_, tokens_, problem_.context);
    std::vector<Operation>& ops = out_.attention;
    elementwise(ops, "norm", 2 * tokens_ * c_.hidden_size);
    c_.attention == AttentionKind::mla ? mla_projections(ops) : gqa_projections(ops);
    transfer(ops, transfers, DecodeStage::before_core);
    core();
    transfer(out_.exchange, transfers, DecodeStage::partials);
    if (s_.kvp > 1) {
      const std::int64_t width = c_.attention == AttentionKind::gqa ? c_.head_dim
                                 : s_.values_before                 ? c_.v_head_dim
                                                                    : c_.kv_lora_rank;
      elementwise(ops, "merge", tokens_ * cut_.output_heads * (s_.kvp + 1) * width);
    }
    if (c_.attention == AttentionKind::mla && !s_.values_before) values(ops);
    const std::int64_t width = c_.attention == AttentionKind::mla ? c_.v_head_dim : c_.head_dim;
    gemm(ops, "o_proj", tokens_, c_.hidden_size, cut_.output_heads * width);
    transfer(ops, transfers, DecodeStage::output);
  }

  /// FFNs, output head, boundary of stages.
  void rest() {
    const bool has_moe = c_.moe.n_routed_experts > 0;
    if (!has_moe || c_.moe.first_k_dense_replace > 0) dense_ffn();
    if (has_moe) moe_ffn();
    ends();
  }

 private:
  void dense_ffn() {
    std::vector<Operation>& ops = out_.dense_ffn;
    elementwise(ops, "norm", 2 * tokens_ * c_.hidden_size);
    mlp(ops, all_tokens_, balanced_part(c_.intermediate_size, cut_.ffn_devices, 0).count, "gate_up_proj", "down_proj");
    transfer(ops, decode_ffn_transfers(c_, s_, false, all_tokens_), DecodeStage::output);
  }

  void moe_ffn() {
    const MoeConfig& moe = c_.moe;
    std::vector<Operation>& ops = out_.moe_ffn;
    elementwise(ops, "norm", 2 * tokens_ * c_.hidden_size);
    // Where columns are cut, every device routes the rows of all groups.
    const std::int64_t routed_here = s_.data_parallel > 1 && s_.ep == 1 ? all_tokens_ : tokens_;
    gemm(ops, "router", routed_here, moe.n_routed_experts, c_.hidden_size);
    ops.back().storage = router_precision(weights_);
    ops.back().compute = router_compute_;
    Operation& experts = add_weighted(ops, OperationKind::moe, "experts");
    experts.m = all_tokens_;
    experts.n = moe.moe_intermediate_size;
    experts.k = c_.hidden_size;
    experts.experts = moe.n_routed_experts;
    experts.top_k = moe.num_experts_per_tok;
    experts.moe_tp = s_.tpf;
    experts.moe_ep = s_.ep;
    if (moe.n_shared_experts > 0) {
      const std::int64_t width = moe.n_shared_experts * moe.moe_intermediate_size;
      if (cut_.shared_experts_whole) {
        mlp(ops, (tokens_ + s_.group() - 1) / s_.group(), width, "shared gate_up", "shared down");
      } else {
        mlp(ops, all_tokens_, (width + cut_.ffn_devices - 1) / cut_.ffn_devices, "shared gate_up", "shared down");
      }
    }
    transfer(ops, decode_ffn_transfers(c_, s_, true, all_tokens_), DecodeStage::output);
    if (s_.gather_experts && s_.ep > 1) elementwise(ops, "expert sum", (s_.ep + 1) * all_tokens_ * c_.hidden_size);
  }

  void ends() {
    gemm(out_.ends, "lm_head", tokens_, c_.vocab_size / s_.group(), c_.hidden_size);
    Operation& boundary = add(out_.boundary, OperationKind::send_receive, "stage boundary");
    boundary.devices = 2;
    boundary.span = s_.devices() * 2;  // between devices of neighbouring stages
    boundary.storage = travelling_;
    boundary.bytes = pipeline_elements(c_, tokens_) * bytes_of(travelling_);
  }

  static Operation& add(std::vector<Operation>& ops, OperationKind kind, const char* name) {
    Operation& op = ops.emplace_back();
    op.kind = kind;
    op.name = name;
    return op;
  }
  Operation& add_weighted(std::vector<Operation>& ops, OperationKind kind, const char* name) const {
    Operation& op = add(ops, kind, name);
    op.compute = weights_compute_;
    op.storage = weights_;
    return op;
  }

  void gemm(std::vector<Operation>& ops, const char* name, std::int64_t m, std::int64_t n, std::int64_t k) const {
    Operation& op = add_weighted(ops, OperationKind::gemm, name);
    op.m = m;
    op.n = n;
    op.k = k;
  }
  void bmm(std::vector<Operation>& ops, const char* name, std::int64_t heads, std::int64_t n, std::int64_t k) const {
    Operation& op = add_weighted(ops, OperationKind::mla_bmm, name);
    op.heads = heads;
    op.m = tokens_;
    op.n = n;
    op.k = k;
  }
  /// `elements` read or written, bfloat16.
  void elementwise(std::vector<Operation>& ops, const char* name, std::int64_t elements) const {
    Operation& op = add(ops, OperationKind::elementwise, name);
    op.bytes = 2 * static_cast<double>(elements);
  }
  void mlp(std::vector<Operation>& ops, std::int64_t m, std::int64_t width, const char* up, const char* down) const {
    gemm(ops, up, m, 2 * width, c_.hidden_size);
    elementwise(ops, "silu", 3 * m * width);
    gemm(ops, down, m, c_.hidden_size, width);
  }

  void mla_projections(std::vector<Operation>& ops) const {
    const std::int64_t q = cut_.query_heads * c_.qk_head_dim();
    if (c_.q_lora_rank > 0) {
      gemm(ops, "qkv_a_proj", tokens_, c_.q_lora_rank + cut_.latent_rows, c_.hidden_size);
      elementwise(ops, "inner norms", 2 * tokens_ * (c_.q_lora_rank + cut_.latent_rows));
      gemm(ops, "q_b_proj", tokens_, q, c_.q_lora_rank);
    } else {
      gemm(ops, "q_kv_a_proj", tokens_, q + cut_.latent_rows, c_.hidden_size);
      elementwise(ops, "inner norms", 2 * tokens_ * cut_.latent_rows);
    }
    bmm(ops, "w_uk", cut_.absorb_heads, cut_.latent, c_.qk_nope_head_dim);
  }
  void gqa_projections(std::vector<Operation>& ops) const {
    gemm(ops, "qkv_proj", tokens_, (cut_.query_heads + 2 * cut_.kv_heads) * c_.head_dim, c_.hidden_size);
    elementwise(ops, "rope", 2 * tokens_ * (cut_.query_heads + cut_.kv_heads) * c_.head_dim);
  }
  void values(std::vector<Operation>& ops) const { bmm(ops, "w_uv", cut_.value_heads, c_.v_head_dim, cut_.latent); }

  void core() {
    Operation& op = add(out_.core, core_kind(c_), "attention");
    op.batch = tokens_;
    op.heads = cut_.core_heads;
    op.context = most_cached_rows(s_, problem_.context);
    op.compute = core_compute_;
    op.storage = problem_.precision.cache;
    if (c_.attention == AttentionKind::mla) {
      op.latent = cut_.latent;
      op.rope = cut_.rope;
      op.kv_heads = 1;
      op.head_dim = cut_.latent + cut_.rope;
      op.value_dim = cut_.latent;
      if (s_.values_before) values(out_.core);
    } else {
      op.kv_heads = cut_.kv_heads;
      op.head_dim = op.value_dim = c_.head_dim;
    }
  }

  void transfer(std::vector<Operation>& ops, const DecodeTransfers& transfers, DecodeStage stage) const {
    for (const DecodeTransfer& t : transfers) {
      if (t.stage != stage) continue;
      Operation& op = ops.emplace_back();
      op.kind = kind_of(t.collective);
      op.name = t.name;
      op.devices = t.devices;
      op.span = t.span;
      op.storage = stage == DecodeStage::partials ? partials_ : travelling_;
      op.bytes = t.buffer_bytes(bytes_of(op.storage));
      // The root sends to, or collects from, one slice after another.
      if (t.collective == DecodeCollective::send) op.count = s_.kvp - 1;
    }
  }

  const ModelConfig& c_;
  const DecodeProblem& problem_;
  const DecodeShards& s_;
  DecodeCut cut_;
  std::int64_t all_tokens_, tokens_;
  Precision weights_, weights_compute_, router_compute_, core_compute_, travelling_, partials_;
  DecodeOperations& out_;
};

}  // namespace

void DecodeOperations::clear() {
  for (auto* ops : {&attention, &core, &exchange, &dense_ffn, &moe_ffn, &ends, &boundary}) ops->clear();
}

void decode_attention_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                                 std::int64_t batch, DecodeOperations& out) {
  out.clear();
  Builder(problem, hardware, layout, batch, out).attention();
}

void decode_ffn_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                           std::int64_t batch, DecodeOperations& out) {
  out.clear();
  Builder(problem, hardware, layout, batch, out).rest();
}

void decode_operations(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                       std::int64_t batch, DecodeOperations& out) {
  out.clear();
  Builder builder(problem, hardware, layout, batch, out);
  builder.attention();
  builder.rest();
}

}  // namespace isomer
