#include "plan/decode_step.h"

#include <algorithm>

namespace isomer {

namespace {

/// Seconds of `ops`, collectives and others apart.
struct Split {
  double compute = 0, links = 0;
};
Split split_of(const Hardware& hardware, const std::vector<Operation>& ops) {
  Split split;
  for (const Operation& op : ops) (is_collective(op.kind) ? split.links : split.compute) += seconds_of(hardware, op);
  return split;
}

double whole(const Hardware& hardware, const std::vector<Operation>& ops) {
  const Split split = split_of(hardware, ops);
  return split.compute + split.links;
}

/// What running the exchange in parts beside the core saves of one layer, at the best number of parts.
void overlap(const Hardware& hardware, const std::vector<Operation>& exchange, double core_s, double exchange_s,
             std::int64_t sequences, StepTime& layer) {
  double best = core_s + exchange_s;
  const auto try_parts = [&](std::int64_t parts) {
    double part_s = 0;
    for (const Operation& op : exchange) {
      Operation part = op;
      part.bytes /= static_cast<double>(parts);
      part_s += seconds_of(hardware, part);
    }
    const auto b = static_cast<double>(parts);
    // Latency that every part pays again may eat the gain: the serial step is always there to fall back on.
    const double time = overlapped_seconds(b, core_s / b, part_s, hardware.overlap_contention);
    if (time >= best) return;
    best = time;
    layer.parts = parts;
  };
  for (std::int64_t parts = 2; parts < std::min<std::int64_t>(sequences, 32); parts *= 2) try_parts(parts);
  if (sequences > 1) try_parts(sequences);
  layer.hidden = core_s + exchange_s - best;
}

}  // namespace

std::vector<StepShare> shares_of(const StepTime& t) {
  return {{"attention", t.core},
          {"projections", t.projections},
          {"exchange", t.exchange},
          {"attention links", t.attention_links},
          {"FFN", t.ffn},
          {"FFN links", t.ffn_links},
          {"head", t.head},
          {"pipeline", t.pipeline},
          {"hidden by overlap", -t.hidden}};
}

double overlapped_seconds(double parts, double compute_s, double exchange_s, double contention) {
  const double serial = parts * (compute_s + exchange_s);
  const double ideal = compute_s >= exchange_s ? parts * compute_s + exchange_s : compute_s + parts * exchange_s;
  return std::min(serial, ideal + (contention - 1) * (serial - ideal));
}

StepTime decode_step_time(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                          std::int64_t batch, DecodeOperations& operations) {
  decode_operations(problem, hardware, layout, batch, operations);
  const StageLayers stage = stage_layers(problem.config, layout.pp);
  // A full pipeline: a token passes every stage, each as slow as the slowest.
  const auto stages = static_cast<double>(layout.pp);
  const double dense = stages * static_cast<double>(stage.dense), moe = stages * static_cast<double>(stage.moe);
  const double layers = dense + moe;

  StepTime time;
  const Split attention = split_of(hardware, operations.attention);
  const double core_s = whole(hardware, operations.core), exchange_s = whole(hardware, operations.exchange);
  if (layout.shards.scheme == DecodeScheme::helix && layout.hop_b) {
    const std::int64_t sequences = batch / layout.pp / layout.shards.data_parallel;
    overlap(hardware, operations.exchange, core_s, exchange_s, sequences, time);
  }
  const Split dense_ffn = split_of(hardware, operations.dense_ffn), moe_ffn = split_of(hardware, operations.moe_ffn);
  time.hidden *= layers;
  time.core = layers * core_s;
  time.exchange = layers * exchange_s;
  time.projections = layers * attention.compute;
  time.attention_links = layers * attention.links;
  time.ffn = dense * dense_ffn.compute + moe * moe_ffn.compute;
  time.ffn_links = dense * dense_ffn.links + moe * moe_ffn.links;
  time.head = whole(hardware, operations.ends);
  time.pipeline = (stages - 1) * whole(hardware, operations.boundary);
  return time;
}

std::string bound_of(const Hardware& hardware, const Operation& op) {
  constexpr double kLaunchShare = 1.0 / 3;
  const OpCost cost = cost_of(op);
  const double seconds = seconds_of(hardware, op) / static_cast<double>(std::max<std::int64_t>(1, op.count));
  if (is_collective(op.kind)) {
    const double wire = cost.bytes_written / hardware.tier_for(op.reach()).bandwidth_bytes_per_s;
    return wire > seconds / 2 ? "link bandwidth" : "link latency";
  }
  const double arithmetic = cost.flops / hardware.peak_flops_per_s(hardware.compute_precision(op.compute));
  const double memory = (cost.bytes_read + cost.bytes_written) / hardware.memory_bandwidth_bytes_per_s;
  if (std::max(arithmetic, memory) < kLaunchShare * seconds) return "launch";
  return arithmetic > memory ? "arithmetic" : "memory";
}

std::vector<PricedOperation> priced_operations(const DecodeProblem& problem, const Hardware& hardware,
                                               const DecodeLayout& layout, std::int64_t batch) {
  DecodeOperations operations;
  decode_operations(problem, hardware, layout, batch, operations);
  const StageLayers stage = stage_layers(problem.config, layout.pp);
  const std::int64_t dense = stage.dense * layout.pp, moe = stage.moe * layout.pp;
  std::vector<PricedOperation> priced;
  const auto add = [&](const std::vector<Operation>& ops, std::int64_t times) {
    for (const Operation& op : ops) {
      const double seconds = static_cast<double>(times) * seconds_of(hardware, op);
      if (seconds > 0) priced.push_back({op, seconds, times * op.count, bound_of(hardware, op)});
    }
  };
  for (const auto* ops : {&operations.attention, &operations.core, &operations.exchange}) add(*ops, dense + moe);
  add(operations.dense_ffn, dense);
  add(operations.moe_ffn, moe);
  add(operations.ends, 1);
  add(operations.boundary, layout.pp - 1);
  std::stable_sort(priced.begin(), priced.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return priced;
}

}  // namespace isomer
