#include "plan/train_step.h"

#include <algorithm>

#include "plan/train_parameters.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

constexpr double kActivationBytes = 2, kWeightBytes = 2, kGradientBytes = 4;

/// The layer as one TP rank sees it.
ModelConfig columns_of(const TrainProblem& problem, const TrainLayout& layout) {
  ModelConfig config = problem.config;
  config.num_attention_heads /= layout.tp;
  config.num_key_value_heads =
      config.attention == AttentionKind::gqa ? config.num_key_value_heads / layout.tp : config.num_attention_heads;
  return config;
}

TrainLayout without_recomputation(TrainLayout layout) {
  layout.recompute = TrainRecompute::none;
  return layout;
}

/// Prices what one device does for one sequence.
class Pricer {
 public:
  Pricer(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout)
      : p_(problem),
        hw_(hardware),
        l_(layout),
        c_(columns_of(problem, layout)),
        gqa_(c_.attention == AttentionKind::gqa),
        sequence_(sequence_part(without_recomputation(layout))),
        own_(token_shards_of(sequence_, problem.seq, 1).rows(0)),
        attention_(train_attention(problem, without_recomputation(layout))),
        core_(scheme_core({sequence_, c_, problem.seq, 1, problem.activations}, 0)) {}

  /// One attention block, forward and backward.
  TrainTime block() const {
    const SchemeWork& work = attention_.work;
    const SchemeBytes& sent = attention_.sent;
    const double core_forward = core_seconds(), projections = projection_seconds();
    const double exchanges_forward = exchange_seconds(sent.forward - sent.forward_passed, work.exchanges_forward);
    const double passes_forward = pass_seconds(sent.forward_passed, work.passes_forward);
    TrainTime time;
    time.core = core_forward * (1 + core_backward_ratio());
    // Forward, two products each in the backward, and keys and values rebuilt there.
    time.projections = 3 * projections + up_projection_seconds(core_.up_projected_again);
    time.sp_links = exchanges_forward + passes_forward +
                    exchange_seconds(sent.backward - sent.backward_passed, work.exchanges_backward) +
                    pass_seconds(sent.backward_passed, work.passes_backward);
    if (l_.recompute == TrainRecompute::attention) {
      time.recompute = core_forward + up_projection_seconds(core_.up_projected_in_core) + passes_forward;
    } else if (l_.recompute != TrainRecompute::none) {
      time.recompute = core_forward + projections + exchanges_forward + passes_forward;
    }
    return time;
  }

  /// One sequence through all layers of a stage, forward and backward.
  TrainTime sequence() const {
    const StageLayers stage = stage_layers(p_.config, l_.pp);
    const auto dense = static_cast<double>(stage.dense), moe = static_cast<double>(stage.moe), layers = dense + moe;
    TrainTime time = block();
    for (double* part : {&time.core, &time.projections, &time.sp_links, &time.recompute}) *part *= layers;
    const double ffn_forward = dense * dense_seconds() + moe * moe_seconds();
    time.ffn = 3 * ffn_forward;
    time.tp_links = layers * 4 * tp_seconds();  // after attention and FFN, forward and backward
    time.ep_links = moe * 4 * ep_seconds();     // dispatch and combine, forward and backward
    if (l_.recompute == TrainRecompute::all) {
      time.recompute += ffn_forward + layers * 2 * tp_seconds() + moe * 2 * ep_seconds();
    }
    time.head = 3 * gemm(own_, p_.config.vocab_size / l_.tp, p_.config.hidden_size);
    time.pipeline_links = l_.pp > 1 ? 2 * boundary_seconds() : 0;
    return time;
  }

  /// Once a step: sums of gradients, ZeRO-3's gathers, the optimiser.
  void once(TrainTime& time, double sequences) const {
    const TrainParameters params = train_parameters(p_.config, l_);
    const int replicas = l_.sequence_ranks() * l_.dp, expert_replicas = replicas / l_.ep;
    const OperationKind sum = l_.zero == 3 ? OperationKind::reduce_scatter : OperationKind::all_reduce;
    time.gradient_links = collective(sum, kGradientBytes * params.shared, replicas, l_.devices()) +
                          collective(sum, kGradientBytes * params.experts, expert_replicas, l_.devices());
    if (l_.zero == 3) {
      // Weights of a layer are gathered before its forward and again before its backward, for every sequence.
      const StageLayers stage = stage_layers(p_.config, l_.pp);
      const auto layers = static_cast<double>(stage.dense + stage.moe);
      const double gather =
          collective(OperationKind::all_gather, kWeightBytes * params.layer_shared, replicas, l_.devices()) +
          collective(OperationKind::all_gather, kWeightBytes * params.layer_experts, expert_replicas, l_.devices());
      time.zero_links = sequences * 2 * layers * gather;
    }
    const double shards = l_.zero > 0 ? replicas : 1, expert_shards = l_.zero > 0 ? expert_replicas : 1;
    const double states = params.shared / shards + params.experts / expert_shards;
    Operation update{.kind = OperationKind::elementwise};
    update.bytes = states * (2 * p_.optimizer_bytes + kGradientBytes + kWeightBytes);
    time.optimizer = seconds_of(hw_, update);
  }

 private:
  double gemm(std::int64_t m, std::int64_t n, std::int64_t k) const {
    Operation op{.kind = OperationKind::gemm, .m = m, .n = n, .k = k};
    op.compute = p_.compute;
    if (is_f32()) op.storage = Precision::f32;
    return seconds_of(hw_, op);
  }
  bool is_f32() const { return p_.activations == DType::f32; }
  double collective(OperationKind kind, double bytes, int devices, int span) const {
    Operation op{.kind = kind};
    op.bytes = bytes;
    op.devices = devices;
    op.span = span;
    return seconds_of(hw_, op);
  }

  double core_seconds() const {
    Operation op{.kind = gqa_ ? OperationKind::prefill_gqa : OperationKind::prefill_mla};
    op.batch = 1;
    op.heads = core_.heads;
    op.kv_heads = core_.kv_heads;
    op.context = p_.seq;
    op.head_dim = core_.key_width;
    op.value_dim = core_.value_width;
    if (is_f32()) op.compute = op.storage = Precision::f32;
    return seconds_of(hw_, op) * core_.share_of_pairs;
  }
  double core_backward_ratio() const {
    const auto key = static_cast<double>(core_.key_width), value = static_cast<double>(core_.value_width);
    return (3 * key + 2 * value) / (key + value);
  }
  double projection_seconds() const {
    const std::int64_t D = c_.hidden_size, q = c_.num_attention_heads * (gqa_ ? c_.head_dim : c_.qk_head_dim());
    double seconds = gemm(own_, D, c_.num_attention_heads * c_.value_head_dim());
    if (gqa_) {
      seconds += gemm(own_, q + 2 * c_.num_key_value_heads * c_.head_dim, D);
    } else {
      seconds += c_.q_lora_rank > 0 ? gemm(own_, c_.q_lora_rank, D) + gemm(own_, q, c_.q_lora_rank) : gemm(own_, q, D);
      seconds += gemm(own_, c_.latent_width(), D) + up_projection_seconds(core_.up_projected);
    }
    Operation norms{.kind = OperationKind::elementwise};
    norms.bytes =
        static_cast<double>(size_of(p_.activations)) * static_cast<double>(own_ * (4 * D + 4 * c_.q_lora_rank + 2 * q));
    return seconds + seconds_of(hw_, norms);
  }
  double up_projection_seconds(double rows_times_heads) const {
    if (rows_times_heads == 0) return 0;
    const std::int64_t heads = core_.up_projected_heads, width = heads * (c_.qk_nope_head_dim + c_.v_head_dim);
    const auto rows = static_cast<std::int64_t>(rows_times_heads / static_cast<double>(heads));
    return gemm(std::max<std::int64_t>(1, rows), width, c_.kv_lora_rank);
  }
  /// A scheme's exchanges of one direction; what they send in all is scheme_bytes', divided evenly among them.
  double exchange_seconds(std::int64_t sent, int exchanges) const {
    if (exchanges == 0) return 0;
    Operation op{.kind = OperationKind::all_to_all};
    op.devices = l_.sp;
    op.span = l_.sp * l_.tp;  // TP devices are the nearest neighbours
    op.bytes = static_cast<double>(sent) / exchanges * l_.sp / (l_.sp - 1.0);
    op.count = exchanges;
    return seconds_of(hw_, op);
  }
  /// Tensors that pass round, one at a time; the next group is as far as the sequence's ranks reach.
  double pass_seconds(std::int64_t sent, int passes) const {
    if (passes == 0) return 0;
    Operation op{.kind = OperationKind::send_receive};
    op.devices = 2;
    op.span = l_.sequence_ranks() * l_.tp;
    op.bytes = static_cast<double>(sent) / passes;
    op.count = passes;
    return seconds_of(hw_, op);
  }
  double dense_seconds() const {
    const std::int64_t width = p_.config.intermediate_size / l_.tp;
    return gemm(own_, 2 * width, c_.hidden_size) + gemm(own_, c_.hidden_size, width);
  }
  double moe_seconds() const {
    const MoeConfig& moe = p_.config.moe;
    if (moe.n_routed_experts == 0) return 0;
    Operation op{.kind = OperationKind::moe};
    op.m = own_ * l_.ep;
    op.n = moe.moe_intermediate_size;
    op.k = c_.hidden_size;
    op.experts = moe.n_routed_experts;
    op.top_k = moe.num_experts_per_tok;
    op.moe_tp = l_.tp;
    op.moe_ep = l_.ep;
    op.compute = p_.compute;
    double seconds = seconds_of(hw_, op) + gemm(own_, moe.n_routed_experts, c_.hidden_size);
    if (moe.n_shared_experts > 0) {
      const std::int64_t width = moe.n_shared_experts * moe.moe_intermediate_size / l_.tp;
      seconds += gemm(own_, 2 * width, c_.hidden_size) + gemm(own_, c_.hidden_size, width);
    }
    return seconds;
  }
  double hidden_bytes() const { return kActivationBytes * static_cast<double>(own_ * c_.hidden_size); }
  double tp_seconds() const { return collective(OperationKind::all_reduce, hidden_bytes(), l_.tp, l_.tp); }
  double ep_seconds() const {
    if (l_.ep == 1) return 0;
    const double visits =
        expected_other_devices(p_.config.moe.n_routed_experts, p_.config.moe.num_experts_per_tok, l_.ep);
    return collective(OperationKind::all_to_all, hidden_bytes() * visits * l_.ep / (l_.ep - 1.0), l_.ep, l_.ep * l_.tp);
  }
  double boundary_seconds() const {
    return collective(OperationKind::send_receive, hidden_bytes(), 2, 2 * l_.sequence_ranks() * l_.tp);
  }

  const TrainProblem& p_;
  const Hardware& hw_;
  const TrainLayout& l_;
  ModelConfig c_;
  bool gqa_;
  Layout sequence_;  // without recomputation
  std::int64_t own_;
  TrainAttention attention_;
  SchemeCore core_;
};

/// Saved by one layer's FFN for one sequence: input, gate, up and their product; the router's choices are small.
double ffn_saved_bytes(const TrainProblem& problem, const TrainLayout& layout, bool moe_layer, double own) {
  const ModelConfig& c = problem.config;
  const auto D = static_cast<double>(c.hidden_size);
  if (!moe_layer) return kActivationBytes * own * (D + 3 * static_cast<double>(c.intermediate_size) / layout.tp);
  const auto width = static_cast<double>(c.moe.moe_intermediate_size);
  const auto k = static_cast<double>(c.moe.num_experts_per_tok), shared = static_cast<double>(c.moe.n_shared_experts);
  return kActivationBytes * own * (D + k * D + 3 * (k + shared) * width / layout.tp);
}

}  // namespace

TrainAttention train_attention(const TrainProblem& problem, const TrainLayout& layout, int rank) {
  const ModelConfig config = columns_of(problem, layout);
  const Layout sequence = sequence_part(layout);
  const SchemeCase block{sequence, config, problem.seq, 1, problem.activations};
  return {scheme_bytes_sent(block, rank), scheme_work(block, rank)};
}

double TrainTime::total() const {
  double sum = 0;
  for (const StepShare& share : shares_of(*this)) sum += share.seconds;
  return sum;
}

std::vector<StepShare> shares_of(const TrainTime& t) {
  return {{"attention", t.core},
          {"projections", t.projections},
          {"FFN", t.ffn},
          {"head", t.head},
          {"SP links", t.sp_links},
          {"TP links", t.tp_links},
          {"EP links", t.ep_links},
          {"pipeline links", t.pipeline_links},
          {"recomputation", t.recompute},
          {"pipeline bubble", t.bubble},
          {"gradient links", t.gradient_links},
          {"ZeRO-3 links", t.zero_links},
          {"optimiser", t.optimizer}};
}

TrainTime train_step_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout) {
  const Pricer pricer(problem, hardware, layout);
  TrainTime time = pricer.sequence();
  const double one = time.total(), sequences = static_cast<double>(problem.batch) / layout.dp;
  for (double* part : {&time.core, &time.projections, &time.ffn, &time.head, &time.sp_links, &time.tp_links,
                       &time.ep_links, &time.pipeline_links, &time.recompute}) {
    *part *= sequences;
  }
  time.bubble = (layout.pp - 1) * one;  // stages idle until the pipeline is full, and while it drains
  pricer.once(time, sequences);
  return time;
}

TrainTime attention_block_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout) {
  return Pricer(problem, hardware, layout).block();
}

TrainMemory train_memory(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout) {
  const TrainParameters params = train_parameters(problem.config, layout);
  const double replicas = layout.sequence_ranks() * layout.dp, expert_replicas = replicas / layout.ep;
  const auto cut = [&](bool cut_over) {
    return cut_over ? params.shared / replicas + params.experts / expert_replicas : params.shared + params.experts;
  };
  TrainMemory memory;
  memory.weights = kWeightBytes * cut(layout.zero == 3);
  memory.gradients = kGradientBytes * cut(layout.zero == 3);
  memory.optimizer = problem.optimizer_bytes * cut(layout.zero > 0);

  const StageLayers stage = stage_layers(problem.config, layout.pp);
  const auto dense = static_cast<double>(stage.dense), moe = static_cast<double>(stage.moe);
  const auto own = static_cast<double>(token_shards_of(sequence_part(layout), problem.seq, 1).rows(0));
  const SchemeWork work = train_attention(problem, layout).work;
  const double dense_ffn = ffn_saved_bytes(problem, layout, false, own);
  const double moe_ffn = ffn_saved_bytes(problem, layout, true, own);
  const auto attention_saved = static_cast<double>(work.saved_bytes);
  const double ffn_saved = layout.recompute == TrainRecompute::all ? 0 : dense * dense_ffn + moe * moe_ffn;
  // One forward, one backward: stage 0 holds as many sequences as there are stages.
  const double under_way = std::min<double>(layout.pp, static_cast<double>(problem.batch) / layout.dp);
  memory.saved = under_way * ((dense + moe) * attention_saved + ffn_saved);
  // The larger of the attention's backward and the FFN's, whose gradients mirror what it saved.
  const auto attention_extra = static_cast<double>(work.core_backward_bytes - work.saved_bytes);
  const double ffn = moe > 0 ? moe_ffn : dense_ffn;
  memory.transient = std::max(attention_extra, layout.recompute == TrainRecompute::all ? 2 * ffn : ffn);
  if (layout.zero == 3) {
    memory.transient += (kWeightBytes + kGradientBytes) * (params.layer_shared + params.layer_experts);
  }
  const double capacity = problem.memory_limit_bytes > 0 ? problem.memory_limit_bytes : hardware.memory_capacity_bytes;
  memory.reserved = problem.reserved_share * capacity;
  return memory;
}

double model_flops_utilisation(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                               double step_s) {
  const ModelConfig& c = problem.config;
  const Layout alone = parse_layout("explicit:1");
  const SchemeWork attention = scheme_work({alone, c, problem.seq, 1, DType::bf16}, 0);
  const StageLayers layers = stage_layers(c, 1);
  const auto tokens = static_cast<double>(problem.seq), D = static_cast<double>(c.hidden_size);
  const double dense = 6 * tokens * 3 * D * static_cast<double>(c.intermediate_size);
  const double moe =
      6 * tokens * D *
      (3 * static_cast<double>((c.moe.num_experts_per_tok + c.moe.n_shared_experts) * c.moe.moe_intermediate_size) +
       static_cast<double>(c.moe.n_routed_experts));
  const double flops =
      static_cast<double>(problem.batch) *
      (static_cast<double>(layers.dense + layers.moe) * (attention.flops_forward + attention.flops_backward) +
       static_cast<double>(layers.dense) * dense + static_cast<double>(layers.moe) * moe +
       6 * tokens * D * static_cast<double>(c.vocab_size));
  return flops / (step_s * layout.devices() * hardware.peak_flops_per_s(hardware.compute_precision(problem.compute)));
}

}  // namespace isomer
