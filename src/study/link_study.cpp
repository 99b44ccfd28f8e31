#include "study/link_study.h"

#include <algorithm>

#include "core/error.h"
#include "model/text.h"
#include "study/weights_source.h"

namespace isomer {

namespace {

constexpr double kLatency = 10e-6;

BlockProblem problem_of(const ModelConfig& config, std::int64_t seq, AttentionCore core) {
  return {.config = config, .dtype = DType::f32, .seq = seq, .core = core};
}

}  // namespace

BlockData link_data(const ModelConfig& config, std::int64_t seq, std::uint64_t seed) {
  return load_block_data(problem_of(config, seq, AttentionCore::fused), {}, std::string(default_text()), seed, false);
}

LinkTime time_block(const ModelConfig& config, const LinkCase& c, const BlockData& data, int repetitions) {
  BlockRunOptions options;
  options.group.num_ranks = c.ranks;
  options.group.threads_per_rank = ClaimRuns::kThreadsPerRank;
  if (c.bandwidth > 0) {
    options.group.link = {.latency_s = kLatency, .bandwidth_bytes_per_s = c.bandwidth, .emulated = true};
  }
  options.repetitions = repetitions;
  options.collect_results = false;
  const BlockRun run = run_block(problem_of(config, c.seq, c.core), data, parse_layout(c.layout), options);
  LinkTime time{.of = c, .virtual_clock = run.virtual_clock, .seconds = run.seconds()};
  for (const RankMeasure& rank : run.ranks) {
    time.kernel_seconds = std::max(time.kernel_seconds, rank.seconds_kernels);
    time.flops = std::max(time.flops, rank.flops_forward + rank.flops_backward);
    time.bytes =
        std::max(time.bytes, static_cast<double>(std::max(rank.bytes_forward + rank.bytes_backward,
                                                          rank.bytes_received_forward + rank.bytes_received_backward)));
    if (rank.seconds == time.seconds) time.waiting_seconds = rank.seconds_waiting;
  }
  return time;
}

nlohmann::json to_json(const LinkTime& time) {
  return {{"layout", time.of.layout},
          {"ranks", time.of.ranks},
          {"seq", time.of.seq},
          {"attention", name_of(time.of.core)},
          {"bandwidth_bytes_per_s", time.of.bandwidth},
          {"clock", time.virtual_clock ? "virtual" : "wall"},
          {"seconds", time.seconds},
          {"kernel_seconds", time.kernel_seconds},
          {"waiting_seconds", time.waiting_seconds},
          {"bytes_through_port", time.bytes},
          {"flops", time.flops}};
}

std::vector<LinkTime> link_times_from(const nlohmann::json& list) {
  std::vector<LinkTime> times;
  for (const auto& json : list) {
    times.push_back({.of = {.layout = json.at("layout").get<std::string>(),
                            .ranks = json.at("ranks").get<int>(),
                            .seq = json.at("seq").get<std::int64_t>(),
                            .core = json.at("attention") == "eager" ? AttentionCore::eager : AttentionCore::fused,
                            .bandwidth = json.at("bandwidth_bytes_per_s").get<double>()},
                     .virtual_clock = json.at("clock") == "virtual",
                     .seconds = json.at("seconds").get<double>(),
                     .kernel_seconds = json.at("kernel_seconds").get<double>(),
                     .waiting_seconds = json.at("waiting_seconds").get<double>(),
                     .bytes = json.at("bytes_through_port").get<double>(),
                     .flops = json.at("flops").get<double>()});
  }
  return times;
}

bool same_place(const LinkTime& time, int ranks, std::int64_t seq, AttentionCore core) {
  return time.of.ranks == ranks && time.of.seq == seq && time.of.core == core;
}

const LinkTime& find_time(const std::vector<LinkTime>& times, const LinkCase& c) {
  const auto found = std::find_if(times.begin(), times.end(), [&](const LinkTime& t) {
    return same_place(t, c.ranks, c.seq, c.core) && t.of.layout == c.layout && t.of.bandwidth == c.bandwidth;
  });
  if (found == times.end()) {
    throw Error(fmt::format("the recording has no time of {} on {} ranks, {} tokens, {}, {} bytes/s", c.layout, c.ranks,
                            c.seq, name_of(c.core), c.bandwidth));
  }
  return *found;
}

double crossover_bandwidth(double bytes_more, double compute_seconds_more) {
  return bytes_more > 0 && compute_seconds_more > 0 ? bytes_more / compute_seconds_more : 0;
}

}  // namespace isomer
