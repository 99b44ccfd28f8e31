#include "study/overlap_times.h"

#include <algorithm>
#include <cmath>

#include "comm/communicator.h"
#include "infer/engine.h"
#include "infer/seeded_cache.h"
#include "study/decode_run.h"

namespace isomer {

namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// One rank's engine under one of the two layouts, and its steps.
class Side {
 public:
  Side(RankContext& ctx, const ModelConfig& config, const ModelWeights& weights, const OverlapCase& c, bool overlap)
      : ctx_(ctx), engine_(ctx, options_of(config, c, overlap), weights) {
    for (std::int64_t b = 0; b < c.batch; ++b) sequences_.push_back(engine_.add_sequence());
    append_seeded_rows(ctx, engine_, sequences_, c.context, c.seed);
  }

  void step(bool virtual_clock) {
    const auto now = [&] { return virtual_clock ? ctx_.clock().now_s() : wall_clock_s(); };
    const std::int32_t token = 5;
    std::vector<Engine::Input> inputs;
    for (const int sequence : sequences_) inputs.push_back({sequence, {&token, 1}});
    ctx_.ops().clear();
    ctx_.ledger().clear();
    ctx_.comm().barrier();
    const double begin = now();
    engine_.decode(ctx_, inputs);
    seconds.push_back(now() - begin);
    double attention = 0;
    for (const auto& [key, summary] : ctx_.ops().summaries()) {
      const bool counts = key.phase == Phase::forward && decode_part_of(key.name) == "attention";
      if (counts) attention += virtual_clock ? summary.cpu_s : summary.wall_s;
    }
    attention_s.push_back(attention);
    exchange_bytes = 0;
    for (const LedgerEntry& entry : ctx_.ledger().entries()) {
      if (entry.tensor == "partial o and lse") exchange_bytes += static_cast<double>(entry.bytes_sent);
    }
  }

  std::vector<double> seconds, attention_s;  // by step
  double exchange_bytes = 0;                 // sent in one

 private:
  static EngineOptions options_of(const ModelConfig& config, const OverlapCase& c, bool overlap) {
    EngineOptions o{.config = config};
    o.layout = parse_decode_layout(fmt::format("helix:kvp={},tpa=1{}", c.kvp, overlap ? "" : ",hopb=off"), config);
    const std::int64_t length = c.context + c.pairs + 1;
    o.config.max_position_embeddings = std::max(o.config.max_position_embeddings, length);
    const std::vector<std::int64_t> lengths(static_cast<std::size_t>(c.batch), length);
    o.cache_tokens = cache_tokens_for(lengths, o.layout, o.page_tokens);
    return o;
  }

  RankContext& ctx_;
  Engine engine_;
  std::vector<int> sequences_;
};

struct RankSteps {
  std::vector<double> on_s, off_s, attention_s;
  double exchange_bytes = 0;
};

/// Pairs of steps, either one first in turn, behind one of each that warms up.
RankSteps steps_of(RankContext& ctx, const ModelConfig& config, const ModelWeights& weights, const OverlapCase& c,
                   bool virtual_clock) {
  Side on(ctx, config, weights, c, true), off(ctx, config, weights, c, false);
  for (int pair = 0; pair <= c.pairs; ++pair) {
    Side* const sides[] = {&on, &off};
    sides[pair % 2]->step(virtual_clock);
    sides[1 - pair % 2]->step(virtual_clock);
  }
  for (auto* times : {&on.seconds, &off.seconds, &off.attention_s}) times->erase(times->begin());
  return {std::move(on.seconds), std::move(off.seconds), std::move(off.attention_s), off.exchange_bytes};
}

std::vector<RankSteps> steps_on(const GroupOptions& group, const ModelConfig& config, const ModelWeights& weights,
                                const OverlapCase& c) {
  std::vector<RankSteps> ranks(static_cast<std::size_t>(c.kvp));
  run_group(group, [&](RankContext& ctx) {
    ranks[static_cast<std::size_t>(ctx.rank())] = steps_of(ctx, config, weights, c, clock_is_virtual(group));
  });
  return ranks;
}

void take_slowest(std::vector<double>& slowest, const std::vector<double>& one) {
  slowest.resize(one.size());
  std::transform(one.begin(), one.end(), slowest.begin(), slowest.begin(),
                 [](double a, double b) { return std::max(a, b); });
}

/// By how much each step is quicker with overlap.
std::vector<double> gains(const std::vector<double>& on_s, const std::vector<double>& off_s) {
  std::vector<double> seconds;
  for (std::size_t i = 0; i < on_s.size(); ++i) seconds.push_back(off_s[i] - on_s[i]);
  return seconds;
}

}  // namespace

OverlapTimes::Share OverlapTimes::hidden() const {
  std::vector<double> shares = gains(on_s, off_s);
  for (double& share : shares) share /= exchange_s;
  std::sort(shares.begin(), shares.end());
  const auto n = static_cast<double>(shares.size());
  const auto first = static_cast<std::size_t>(std::max(0.0, std::floor((n - 1.96 * std::sqrt(n)) / 2)));
  return {shares[shares.size() / 2], shares[first], shares[shares.size() - 1 - first]};
}

OverlapTimes time_overlap(const ModelConfig& config, const ModelWeights& weights, const OverlapCase& c) {
  GroupOptions group{.num_ranks = c.kvp, .threads_per_rank = 1};
  OverlapCase unlinked = c;
  unlinked.pairs = std::min(c.pairs, 101);
  OverlapTimes times{.of = c, .virtual_clock = clock_is_virtual(group)};
  double bytes = 0;
  for (const RankSteps& rank : steps_on(group, config, weights, unlinked)) {
    times.exchange_s = std::max(times.exchange_s, median(rank.attention_s) / 2);
    bytes = std::max(bytes, rank.exchange_bytes);
    take_slowest(times.on_s, rank.on_s);
    take_slowest(times.off_s, rank.off_s);
  }
  times.cost_s = -median(gains(times.on_s, times.off_s));
  times.on_s.clear();
  times.off_s.clear();
  group.link = {.latency_s = 0, .bandwidth_bytes_per_s = bytes / times.exchange_s, .emulated = true};
  for (const RankSteps& rank : steps_on(group, config, weights, c)) {
    times.attention_s = std::max(times.attention_s, median(rank.attention_s));
    take_slowest(times.on_s, rank.on_s);
    take_slowest(times.off_s, rank.off_s);
  }
  return times;
}

}  // namespace isomer
