#include "plan/train_pricer.h"

#include <algorithm>

#include "plan/train_parameters.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

TrainLayout without_recomputation(TrainLayout layout) {
  layout.recompute = TrainRecompute::none;
  return layout;
}

/// Lists the operations of one device.
class Builder {
 public:
  Builder(const TrainProblem& problem, const TrainLayout& layout, std::vector<TrainSpending>& out)
      : problem_(problem),
        layout_(layout),
        columns_(train_columns(problem, layout)),
        gqa_(columns_.attention == AttentionKind::gqa),
        sequence_(sequence_part(without_recomputation(layout))),
        own_(token_shards_of(sequence_, problem.seq, 1).rows(0)),
        attention_(train_attention(problem, without_recomputation(layout))),
        core_(scheme_core({sequence_, columns_, problem.seq, 1, problem.activations}, 0)),
        out_(&out) {}

  void write_to(std::vector<TrainSpending>& out) { out_ = &out; }
  /// One attention block, forward and backward, `times` times.
  void block(std::int64_t times) const;
  /// `count` sequences through all layers of a stage and the head, forward and backward.
  void sequences(std::int64_t count) const;
  /// Once a step: sums of gradients, ZeRO-3's gathers (for every one of `count` sequences), the optimiser.
  void once(std::int64_t count) const;

 private:
  using Part = double TrainTime::*;
  /// `op`, so many times; `share` of its time.
  TrainSpending& spend(Part part, const char* name, const Operation& op, std::int64_t times, double share = 1) const {
    return out_->emplace_back(TrainSpending{part, name, op, times, share});
  }

  void core(std::int64_t times) const;
  void projections(std::int64_t times) const;
  void exchanges(std::int64_t times) const;
  void dense_ffn(std::int64_t times) const;
  void moe_ffn(std::int64_t times) const;
  void links_of_layers(std::int64_t layers, std::int64_t moe_layers) const;
  void up_projection(Part part, double rows_times_heads, std::int64_t times) const;

  Operation gemm(std::int64_t m, std::int64_t n, std::int64_t k) const;
  Operation attention_core() const;
  Operation collective(OperationKind kind, double bytes, int devices, int span) const;
  Operation exchange(std::int64_t sent, int exchanges) const;
  Operation pass(std::int64_t sent, int passes) const;
  bool is_f32() const { return problem_.activations == DType::f32; }
  /// How often a product is done: forward, two in the backward, and once more where its part is recomputed.
  bool block_again() const { return layout_.recompute >= TrainRecompute::block; }
  bool all_again() const { return layout_.recompute == TrainRecompute::all; }
  double hidden_bytes() const;

  const TrainProblem& problem_;
  const TrainLayout& layout_;
  ModelConfig columns_;  // as one TP rank sees it
  bool gqa_;
  Layout sequence_;  // without recomputation
  std::int64_t own_;
  TrainAttention attention_;
  SchemeCore core_;
  std::vector<TrainSpending>* out_;
};

void Builder::block(std::int64_t times) const {
  core(times);
  projections(times);
  exchanges(times);
}

void Builder::core(std::int64_t times) const {
  const Operation op = attention_core();
  const auto key = static_cast<double>(core_.key_width), value = static_cast<double>(core_.value_width);
  const double backward = (3 * key + 2 * value) / (key + value);
  spend(&TrainTime::core, "attention", op, times, core_.share_of_pairs);
  spend(&TrainTime::core, "attention, backward", op, times, core_.share_of_pairs * backward).attention_backward = true;
  if (layout_.recompute == TrainRecompute::none) return;
  spend(&TrainTime::recompute, "attention", op, times, core_.share_of_pairs);
  if (layout_.recompute == TrainRecompute::attention) {
    up_projection(&TrainTime::recompute, core_.up_projected_in_core, times);
  }
}

void Builder::projections(std::int64_t times) const {
  const ModelConfig& c = columns_;
  const std::int64_t D = c.hidden_size, q = c.num_attention_heads * (gqa_ ? c.head_dim : c.qk_head_dim());
  // Forward, and two products each in the backward.
  const auto product = [&](const char* name, const Operation& op) {
    spend(&TrainTime::projections, name, op, 3 * times);
    if (block_again()) spend(&TrainTime::recompute, name, op, times);
  };
  product("o_proj", gemm(own_, D, c.num_attention_heads * c.value_head_dim()));
  if (gqa_) {
    product("qkv_proj", gemm(own_, q + 2 * c.num_key_value_heads * c.head_dim, D));
  } else {
    if (c.q_lora_rank > 0) product("q_a_proj", gemm(own_, c.q_lora_rank, D));
    if (c.q_lora_rank > 0) product("q_b_proj", gemm(own_, q, c.q_lora_rank));
    if (c.q_lora_rank == 0) product("q_proj", gemm(own_, q, D));
    product("kv_a_proj", gemm(own_, c.latent_width(), D));
    up_projection(&TrainTime::projections, core_.up_projected, 3 * times);
    if (block_again()) up_projection(&TrainTime::recompute, core_.up_projected, times);
    up_projection(&TrainTime::projections, core_.up_projected_again, times);  // keys and values rebuilt
  }
  Operation norms{.kind = OperationKind::elementwise};
  norms.bytes = static_cast<double>(size_of(problem_.activations)) *
                static_cast<double>(own_ * (4 * D + 4 * c.q_lora_rank + 2 * q));
  product("norms, RoPE, residual", norms);
}

void Builder::up_projection(Part part, double rows_times_heads, std::int64_t times) const {
  if (rows_times_heads == 0) return;
  const std::int64_t heads = core_.up_projected_heads,
                     width = heads * (columns_.qk_nope_head_dim + columns_.v_head_dim);
  const auto rows = static_cast<std::int64_t>(rows_times_heads / static_cast<double>(heads));
  spend(part, "kv_b_proj", gemm(std::max<std::int64_t>(1, rows), width, columns_.kv_lora_rank), times);
}

void Builder::exchanges(std::int64_t times) const {
  const SchemeWork& work = attention_.work;
  const SchemeBytes& sent = attention_.sent;
  const auto exchanged = [&](Part part, const char* name, std::int64_t bytes, int exchanges) {
    if (exchanges > 0) spend(part, name, exchange(bytes, exchanges), times);
  };
  const auto passed = [&](Part part, const char* name, std::int64_t bytes, int passes) {
    if (passes > 0) spend(part, name, pass(bytes, passes), times);
  };
  exchanged(&TrainTime::sp_links, "SP exchange", sent.forward - sent.forward_passed, work.exchanges_forward);
  passed(&TrainTime::sp_links, "SP ring", sent.forward_passed, work.passes_forward);
  exchanged(&TrainTime::sp_links, "SP exchange, backward", sent.backward - sent.backward_passed,
            work.exchanges_backward);
  passed(&TrainTime::sp_links, "SP ring, backward", sent.backward_passed, work.passes_backward);
  if (block_again()) {
    exchanged(&TrainTime::recompute, "SP exchange", sent.forward - sent.forward_passed, work.exchanges_forward);
  }
  if (layout_.recompute != TrainRecompute::none) {
    passed(&TrainTime::recompute, "SP ring", sent.forward_passed, work.passes_forward);
  }
}

void Builder::sequences(std::int64_t count) const {
  const StageLayers stage = stage_layers(problem_.config, layout_.pp);
  const std::int64_t layers = count * (stage.dense + stage.moe), moe_layers = count * stage.moe;
  block(layers);
  dense_ffn(count * stage.dense);
  moe_ffn(moe_layers);
  links_of_layers(layers, moe_layers);
  spend(&TrainTime::head, "head", gemm(own_, problem_.config.vocab_size / layout_.tp, columns_.hidden_size), 3 * count);
  if (layout_.pp > 1) {
    spend(&TrainTime::pipeline_links, "pipeline",
          collective(OperationKind::send_receive, hidden_bytes(), 2, 2 * layout_.sequence_ranks() * layout_.tp),
          2 * count);
  }
}

void Builder::dense_ffn(std::int64_t times) const {
  const std::int64_t width = problem_.config.intermediate_size / layout_.tp, D = columns_.hidden_size;
  for (const bool again : {false, true}) {
    if (again && !all_again()) continue;
    const Part part = again ? &TrainTime::recompute : &TrainTime::ffn;
    spend(part, "FFN, gate and up", gemm(own_, 2 * width, D), again ? times : 3 * times);
    spend(part, "FFN, down", gemm(own_, D, width), again ? times : 3 * times);
  }
}

void Builder::moe_ffn(std::int64_t times) const {
  const MoeConfig& moe = problem_.config.moe;
  if (moe.n_routed_experts == 0) return;
  const std::int64_t D = columns_.hidden_size, width = moe.n_shared_experts * moe.moe_intermediate_size / layout_.tp;
  Operation experts{.kind = OperationKind::moe};
  experts.m = own_ * layout_.ep;
  experts.n = moe.moe_intermediate_size;
  experts.k = D;
  experts.experts = moe.n_routed_experts;
  experts.top_k = moe.num_experts_per_tok;
  experts.moe_tp = layout_.tp;
  experts.moe_ep = layout_.ep;
  experts.compute = problem_.compute;
  for (const bool again : {false, true}) {
    if (again && !all_again()) continue;
    const Part part = again ? &TrainTime::recompute : &TrainTime::ffn;
    const std::int64_t n = again ? times : 3 * times;
    spend(part, "routed experts", experts, n);
    spend(part, "router", gemm(own_, moe.n_routed_experts, D), n);
    if (moe.n_shared_experts == 0) continue;
    spend(part, "shared experts, gate and up", gemm(own_, 2 * width, D), n);
    spend(part, "shared experts, down", gemm(own_, D, width), n);
  }
}

/// After attention and FFN under TP, dispatch and combine under EP, forward and backward.
void Builder::links_of_layers(std::int64_t layers, std::int64_t moe_layers) const {
  const TrainLayout& l = layout_;
  const Operation sum = collective(OperationKind::all_reduce, hidden_bytes(), l.tp, l.tp);
  if (l.tp > 1) {
    spend(&TrainTime::tp_links, "TP sum", sum, 4 * layers);
    if (all_again()) spend(&TrainTime::recompute, "TP sum", sum, 2 * layers);
  }
  if (l.ep == 1) return;
  const MoeConfig& moe = problem_.config.moe;
  const double visits = expected_other_devices(moe.n_routed_experts, moe.num_experts_per_tok, l.ep);
  const Operation dispatch =
      collective(OperationKind::all_to_all, hidden_bytes() * visits * l.ep / (l.ep - 1.0), l.ep, l.ep * l.tp);
  spend(&TrainTime::ep_links, "EP dispatch and combine", dispatch, 4 * moe_layers);
  if (all_again()) spend(&TrainTime::recompute, "EP dispatch and combine", dispatch, 2 * moe_layers);
}

void Builder::once(std::int64_t count) const {
  const TrainParameters params = train_parameters(problem_.config, layout_);
  const TrainLayout& l = layout_;
  const int replicas = l.sequence_ranks() * l.dp, expert_replicas = replicas / l.ep;
  const OperationKind sum = l.zero == 3 ? OperationKind::reduce_scatter : OperationKind::all_reduce;
  spend(&TrainTime::gradient_links, "gradients", collective(sum, kGradientBytes * params.shared, replicas, l.devices()),
        1);
  spend(&TrainTime::gradient_links, "gradients of experts",
        collective(sum, kGradientBytes * params.experts, expert_replicas, l.devices()), 1);
  if (l.zero == 3) {
    // Weights of a layer are gathered before its forward and again before its backward, for every sequence.
    const StageLayers stage = stage_layers(problem_.config, l.pp);
    const std::int64_t gathers = count * 2 * (stage.dense + stage.moe);
    const OperationKind gather = OperationKind::all_gather;
    spend(&TrainTime::zero_links, "ZeRO-3 weights",
          collective(gather, kWeightBytes * params.layer_shared, replicas, l.devices()), gathers);
    spend(&TrainTime::zero_links, "ZeRO-3 weights of experts",
          collective(gather, kWeightBytes * params.layer_experts, expert_replicas, l.devices()), gathers);
  }
  const double shards = l.zero > 0 ? replicas : 1, expert_shards = l.zero > 0 ? expert_replicas : 1;
  const double states = params.shared / shards + params.experts / expert_shards;
  Operation update{.kind = OperationKind::elementwise};
  update.bytes = states * (2 * problem_.optimizer_bytes + kGradientBytes + kWeightBytes);
  spend(&TrainTime::optimizer, "optimiser", update, 1);
}

Operation Builder::gemm(std::int64_t m, std::int64_t n, std::int64_t k) const {
  Operation op{.kind = OperationKind::gemm, .m = m, .n = n, .k = k};
  op.compute = problem_.compute;
  if (is_f32()) op.storage = Precision::f32;
  return op;
}

Operation Builder::attention_core() const {
  Operation op{.kind = gqa_ ? OperationKind::prefill_gqa : OperationKind::prefill_mla};
  op.batch = 1;
  op.heads = core_.heads;
  op.kv_heads = core_.kv_heads;
  op.context = problem_.seq;
  op.head_dim = core_.key_width;
  op.value_dim = core_.value_width;
  if (is_f32()) op.compute = op.storage = Precision::f32;
  return op;
}

Operation Builder::collective(OperationKind kind, double bytes, int devices, int span) const {
  Operation op{.kind = kind};
  op.bytes = bytes;
  op.devices = devices;
  op.span = span;
  return op;
}

/// A scheme's exchanges of one direction; what they send in all is scheme_bytes', divided evenly among them. TP devices
/// are the nearest neighbours.
Operation Builder::exchange(std::int64_t sent, int exchanges) const {
  const double bytes = static_cast<double>(sent) / exchanges * layout_.sp / (layout_.sp - 1.0);
  Operation op = collective(OperationKind::all_to_all, bytes, layout_.sp, layout_.sp * layout_.tp);
  op.count = exchanges;
  return op;
}

/// Tensors that pass round, one at a time; the next group is as far as the sequence's ranks reach.
Operation Builder::pass(std::int64_t sent, int passes) const {
  Operation op = collective(OperationKind::send_receive, static_cast<double>(sent) / passes, 2,
                            layout_.sequence_ranks() * layout_.tp);
  op.count = passes;
  return op;
}

double Builder::hidden_bytes() const { return kActivationBytes * static_cast<double>(own_ * columns_.hidden_size); }

}  // namespace

TrainWork train_work(const TrainProblem& problem, const TrainLayout& layout) {
  TrainWork work{.num_sequences = problem.batch / layout.dp, .stages = layout.pp};
  Builder builder(problem, layout, work.sequences);
  builder.sequences(work.num_sequences);
  builder.write_to(work.once);
  builder.once(work.num_sequences);
  return work;
}

std::vector<TrainSpending> block_work(const TrainProblem& problem, const TrainLayout& layout) {
  std::vector<TrainSpending> spendings;
  Builder(problem, layout, spendings).block(1);
  return spendings;
}

double seconds_of(const Hardware& hardware, const TrainSpending& s) {
  if (s.times <= 0 || s.share <= 0) return 0;
  const double share = s.attention_backward ? s.share / hardware.backward_efficiency : s.share;
  return static_cast<double>(s.times) * share * seconds_of(hardware, s.operation);
}

TrainTime time_of(const TrainWork& work, std::span<const double> seconds, double link_overlap) {
  TrainTime time;
  std::size_t next = 0;
  for (const TrainSpending& s : work.sequences) time.*s.part += seconds[next++];
  // Stages idle until the pipeline is full, and while it drains.
  time.bubble = (work.stages - 1) * time.total() / static_cast<double>(work.num_sequences);
  for (const TrainSpending& s : work.once) time.*s.part += seconds[next++];
  const double kernels = time.core + time.projections + time.ffn + time.head + time.recompute;
  const double links = time.sp_links + time.ep_links + time.gradient_links + time.zero_links;
  time.hidden = link_overlap * std::min(kernels, links);
  return time;
}

void add_operations(const Hardware& hardware, const std::vector<TrainSpending>& spendings,
                    std::vector<PricedOperation>& list) {
  for (const TrainSpending& s : spendings) {
    const double seconds = seconds_of(hardware, s);
    if (seconds <= 0) continue;
    PricedOperation& priced = list.emplace_back(
        PricedOperation{s.operation, seconds, s.times * s.operation.count, bound_of(hardware, s.operation)});
    priced.operation.name = s.name;
    if (s.part == &TrainTime::recompute) priced.operation.name += ", again";
  }
}

}  // namespace isomer
