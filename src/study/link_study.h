// One attention block under several schemes and emulated links: times beside what bytes and FLOPs account for.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "study/claim_runs.h"

namespace isomer {

struct LinkCase {
  std::string layout;
  int ranks = 2;
  std::int64_t seq = 1024;
  AttentionCore core = AttentionCore::fused;
  double bandwidth = 0;  // bytes/s a rank; 0: no limit
};

struct LinkTime {
  LinkCase of;
  bool virtual_clock = false;
  double seconds = 0;          // forward + backward, of the slowest rank
  double kernel_seconds = 0;   // of the rank that computes longest
  double waiting_seconds = 0;  // of the slowest rank, in collectives
  double bytes = 0;            // forward + backward, through the busiest port: the larger of sent and received
  double flops = 0;            // of the rank that computes most
};

/// Runs one block for real, `repetitions` times; the first is a warm-up where there are more, then the median counts.
LinkTime time_block(const ModelConfig& config, const LinkCase& c, const BlockData& data, int repetitions);
/// Seeded weights and data of S tokens of `config`.
BlockData link_data(const ModelConfig& config, std::int64_t seq, std::uint64_t seed);

nlohmann::json to_json(const LinkTime& time);
std::vector<LinkTime> link_times_from(const nlohmann::json& list);
/// The time of a case; throws isomer::Error naming the case if it was not recorded.
const LinkTime& find_time(const std::vector<LinkTime>& times, const LinkCase& c);
bool same_place(const LinkTime& time, int ranks, std::int64_t seq, AttentionCore core);

/// Bandwidth at which a scheme of more arithmetic and one of more bytes take equally long: bytes more / seconds of
/// arithmetic more. Below it the one with fewer bytes is faster. 0 where one scheme has less of both.
double crossover_bandwidth(double bytes_more, double compute_seconds_more);

}  // namespace isomer
