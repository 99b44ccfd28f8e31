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
struct Overlap {
  double hidden = 0;
  std::int64_t parts = 1;
};
Overlap overlap(const Hardware& hardware, const std::vector<Operation>& exchange, double core_s, double exchange_s,
                std::int64_t sequences) {
  double best = core_s + exchange_s;
  Overlap result;
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
    result.parts = parts;
  };
  for (std::int64_t parts = 2; parts < std::min<std::int64_t>(sequences, 32); parts *= 2) try_parts(parts);
  if (sequences > 1) try_parts(sequences);
  result.hidden = core_s + exchange_s - best;
  return result;
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

namespace {

/// Whether two layouts' attention is the same for the same tokens of a group.
bool same_attention(const DecodeLayout& a, const DecodeLayout& b) {
  DecodeShards x = a.shards, y = b.shards;
  for (DecodeShards* s : {&x, &y}) {
    s->data_parallel = s->tpf = s->ep = 1;
    s->gather_experts = false;
  }
  return x == y && a.hop_b == b.hop_b;
}

}  // namespace

std::size_t StepPricer::RestHash::operator()(const RestKey& key) const {
  constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15;
  std::uint64_t hash = (key.axes ^ (static_cast<std::uint64_t>(key.tokens) * kMix)) * kMix;
  return static_cast<std::size_t>(hash ^ (hash >> 32));
}

StepPricer::Attention StepPricer::price_attention(const DecodeLayout& layout, std::int64_t batch) {
  decode_attention_operations(problem_, hardware_, layout, batch, operations_);
  const Split split = split_of(hardware_, operations_.attention);
  Attention a{.core = whole(hardware_, operations_.core),
              .exchange = whole(hardware_, operations_.exchange),
              .compute = split.compute,
              .links = split.links};
  if (layout.shards.scheme == DecodeScheme::helix && layout.hop_b) {
    const std::int64_t sequences = batch / layout.pp / layout.shards.data_parallel;
    const Overlap found = overlap(hardware_, operations_.exchange, a.core, a.exchange, sequences);
    a.hidden = found.hidden;
    a.parts = found.parts;
  }
  return a;
}

const StepPricer::Attention& StepPricer::attention(const DecodeLayout& layout, std::int64_t batch) {
  if (!same_attention(layout, attention_layout_)) {
    attention_layout_ = layout;
    attention_by_tokens_.clear();
  }
  const std::int64_t tokens = batch / layout.pp / layout.shards.data_parallel;
  for (const auto& [known, time] : attention_by_tokens_) {
    if (known == tokens) return time;
  }
  attention_by_tokens_.emplace_back(tokens, price_attention(layout, batch));
  return attention_by_tokens_.back().second;
}

StepPricer::Rest StepPricer::price_rest(const DecodeLayout& layout, std::int64_t batch) {
  decode_ffn_operations(problem_, hardware_, layout, batch, operations_);
  const Split dense = split_of(hardware_, operations_.dense_ffn), moe = split_of(hardware_, operations_.moe_ffn);
  return {.dense = dense.compute,
          .dense_links = dense.links,
          .moe = moe.compute,
          .moe_links = moe.links,
          .head = whole(hardware_, operations_.ends),
          .boundary = whole(hardware_, operations_.boundary)};
}

const StepPricer::Rest& StepPricer::rest(const DecodeLayout& layout, std::int64_t batch) {
  const DecodeShards& s = layout.shards;
  // What a group's devices do of the FFN depends on their number alone; under Medha on the root's columns.
  const bool medha = s.scheme == DecodeScheme::medha;
  std::uint64_t axes = medha ? 1 : 0;
  axes = 2 * axes + (s.gather_experts ? 1 : 0);
  for (const int size : {s.group(), s.data_parallel, s.tpf, s.ep, medha ? s.tpa : 0}) {
    axes = (axes << 12) + static_cast<std::uint64_t>(size);  // sizes of 4096 and more may share a key with others ...
  }
  const bool keyed = s.devices() < 4096;  // ... and are priced anew
  const RestKey key{axes, batch / layout.pp};
  if (const auto found = rest_.find(key); keyed && found != rest_.end()) return found->second;
  return rest_[key] = price_rest(layout, batch);
}

StepTime StepPricer::operator()(const DecodeLayout& layout, std::int64_t batch) {
  const StageLayers stage = stage_layers(problem_.config, layout.pp);
  // A full pipeline: a token passes every stage, each as slow as the slowest.
  const auto stages = static_cast<double>(layout.pp);
  const double dense = stages * static_cast<double>(stage.dense), moe = stages * static_cast<double>(stage.moe);
  const double layers = dense + moe;
  const Attention& a = attention(layout, batch);
  const Rest& r = rest(layout, batch);
  return {.core = layers * a.core,
          .projections = layers * a.compute,
          .exchange = layers * a.exchange,
          .attention_links = layers * a.links,
          .ffn = dense * r.dense + moe * r.moe,
          .ffn_links = dense * r.dense_links + moe * r.moe_links,
          .head = r.head,
          .pipeline = (stages - 1) * r.boundary,
          .hidden = layers * a.hidden,
          .parts = a.parts};
}

StepTime decode_step_time(const DecodeProblem& problem, const Hardware& hardware, const DecodeLayout& layout,
                          std::int64_t batch) {
  return StepPricer(problem, hardware)(layout, batch);
}

std::string bound_of(const Hardware& hardware, const Operation& op) {
  constexpr double kLaunchShare = 1.0 / 3, kLaunch_s = 100e-6;
  const OpCost cost = cost_of(op);
  const double seconds = seconds_of(hardware, op) / static_cast<double>(std::max<std::int64_t>(1, op.count));
  if (is_collective(op.kind)) {
    const double wire = cost.bytes_written / hardware.tier_for(op.reach()).bandwidth_bytes_per_s;
    return wire > seconds / 2 ? "link bandwidth" : "link latency";
  }
  const double arithmetic = cost.flops / hardware.peak_flops_per_s(hardware.compute_precision(op.compute));
  const double memory = (cost.bytes_read + cost.bytes_written) / hardware.memory_bandwidth_bytes_per_s;
  if (std::max(arithmetic, memory) < kLaunchShare * seconds)
    return seconds < kLaunch_s ? "launch" : "kernel efficiency";
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
