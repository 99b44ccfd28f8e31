#include "plan/train_step.h"

#include <algorithm>

#include "plan/train_parameters.h"
#include "plan/train_pricer.h"
#include "sharding/sequence_layout.h"

namespace isomer {

namespace {

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

ModelConfig train_columns(const TrainProblem& problem, const TrainLayout& layout) {
  ModelConfig config = problem.config;
  config.num_attention_heads /= layout.tp;
  config.num_key_value_heads =
      config.attention == AttentionKind::gqa ? config.num_key_value_heads / layout.tp : config.num_attention_heads;
  return config;
}

TrainAttention train_attention(const TrainProblem& problem, const TrainLayout& layout, int rank) {
  const ModelConfig config = train_columns(problem, layout);
  const Layout sequence = sequence_part(layout);
  const SchemeCase block{sequence, config, problem.seq, 1, problem.activations};
  return {scheme_bytes_sent(block, rank), scheme_work(block, rank)};
}

double TrainTime::total() const {
  return core + projections + ffn + head + sp_links + tp_links + ep_links + pipeline_links + recompute + bubble +
         gradient_links + zero_links + optimizer - hidden;
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
          {"optimiser", t.optimizer},
          {"hidden by overlap", -t.hidden}};
}

bool is_held_to_executor(std::string_view part, const TrainLayout& layout) {
  if (part == "recomputation") return layout.recompute != TrainRecompute::all;
  return part == "attention" || part == "projections" || part == "SP links";
}

TrainTime train_step_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout) {
  const TrainWork work = train_work(problem, layout);
  std::vector<double> seconds;
  seconds.reserve(work.sequences.size() + work.once.size());
  for (const auto* part : {&work.sequences, &work.once}) {
    for (const TrainSpending& s : *part) seconds.push_back(seconds_of(hardware, s));
  }
  return time_of(work, seconds, hardware.link_overlap);
}

std::vector<PricedOperation> train_operations(const TrainProblem& problem, const Hardware& hardware,
                                              const TrainLayout& layout) {
  const TrainWork work = train_work(problem, layout);
  std::vector<PricedOperation> list;
  add_operations(hardware, work.sequences, list);
  add_operations(hardware, work.once, list);
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return list;
}

TrainTime attention_block_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                               std::vector<PricedOperation>* list) {
  const std::vector<TrainSpending> spendings = block_work(problem, layout);
  TrainTime time;
  for (const TrainSpending& s : spendings) time.*s.part += seconds_of(hardware, s);
  if (list != nullptr) add_operations(hardware, spendings, *list);
  return time;
}

TrainMemory train_memory(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout) {
  return train_memory(problem, hardware, layout, train_attention(problem, layout).work);
}

TrainMemory train_memory(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                         const SchemeWork& work) {
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
  // Forward, and twice as much backward: what is computed again, a fused attention's scores too, is no work of the
  // model.
  const double dense = 6 * tokens * 3 * D * static_cast<double>(c.intermediate_size);
  const double moe =
      6 * tokens * D *
      (3 * static_cast<double>((c.moe.num_experts_per_tok + c.moe.n_shared_experts) * c.moe.moe_intermediate_size) +
       static_cast<double>(c.moe.n_routed_experts));
  const double flops = static_cast<double>(problem.batch) *
                       (static_cast<double>(layers.dense + layers.moe) * 3 * attention.flops_forward +
                        static_cast<double>(layers.dense) * dense + static_cast<double>(layers.moe) * moe +
                        6 * tokens * D * static_cast<double>(c.vocab_size));
  return flops / (step_s * layout.devices() * hardware.peak_flops_per_s(hardware.compute_precision(problem.compute)));
}

}  // namespace isomer
