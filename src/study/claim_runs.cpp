#include "study/claim_runs.h"

#include "cost/scheme_bytes.h"
#include "model/text.h"
#include "sharding/sequence_layout.h"
#include "study/weights_source.h"

namespace isomer {

void ClaimRuns::begin(const std::string& id) {
  id_ = id;
  progress("dry runs");
}

void ClaimRuns::progress(const std::string& what) const { options_.progress(fmt::format("{}: {}", id_, what)); }

void ClaimRuns::disagree(const std::string& what) { disagreements_.push_back(fmt::format("{}: {}", id_, what)); }

BlockRunOptions ClaimRuns::run_options(const ClaimCase& c, bool dry) const {
  BlockRunOptions options;
  options.group.num_ranks = c.ranks;
  options.group.threads_per_rank = kThreadsPerRank;
  options.group.dry_run = dry;
  options.group.memory_policy = c.policy;
  options.repetitions = 1;
  return options;
}

namespace {

std::string name_of_case(const ClaimCase& c) {
  const ModelConfig& m = c.config;
  return fmt::format("{} h{} d{} n{} r{} v{}, {}, P={}, S={}, {}, {}, {}", m.name, m.num_attention_heads,
                     m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim, c.layout, c.ranks, c.seq,
                     name_of(c.dtype), name_of(c.core), name_of(c.policy));
}

}  // namespace

void ClaimRuns::check_bytes(const ClaimCase& c, const BlockRun& run) {
  const Layout layout = sized_layout(parse_layout(c.layout), c.ranks);
  const SchemeCase block{layout, c.config, c.seq, 1, c.dtype};
  for (const RankMeasure& rank : run.ranks) {
    const SchemeBytes sent = scheme_bytes_sent(block, rank.rank);
    const SchemeBytes received = scheme_bytes_received(block, rank.rank);
    if (rank.bytes_forward != sent.forward || rank.bytes_backward != sent.backward ||
        rank.bytes_received_forward != received.forward || rank.bytes_received_backward != received.backward) {
      disagree(fmt::format("{}: rank {} counts {} + {} bytes sent, the closed form says {} + {}", name_of_case(c),
                           rank.rank, rank.bytes_forward, rank.bytes_backward, sent.forward, sent.backward));
    }
  }
}

const BlockRun& ClaimRuns::dry(const ClaimCase& c) {
  const std::string key = name_of_case(c);
  const auto known = dry_runs_.find(key);
  if (known != dry_runs_.end()) return known->second;
  const BlockProblem problem = c.problem();
  const BlockData data = load_block_data(problem, {}, "", options_.seed, true);
  BlockRun run = run_block(problem, data, parse_layout(c.layout), run_options(c, true));
  check_bytes(c, run);
  return dry_runs_.emplace(key, std::move(run)).first->second;
}

std::int64_t ClaimRuns::dry_peak(const ClaimCase& c) {
  return dry(c).largest(&RankMeasure::peak_activation_bytes).peak_activation_bytes;
}

std::int64_t ClaimRuns::dry_saved(const ClaimCase& c) { return dry(c).largest(&RankMeasure::saved_bytes).saved_bytes; }

BlockData ClaimRuns::data(const ClaimCase& c) const {
  return load_block_data(c.problem(), {}, std::string(default_text()), options_.seed, false);
}

BlockRun ClaimRuns::real(const ClaimCase& c, const BlockData& data) {
  progress(fmt::format("running {} on {} ranks, {} attention", c.layout, c.ranks, name_of(c.core)));
  BlockRun run = run_block(c.problem(), data, parse_layout(c.layout), run_options(c, false));
  check_bytes(c, run);
  const BlockRun& predicted = dry(c);
  for (const RankMeasure& rank : run.ranks) {
    const auto& twin = predicted.ranks.at(static_cast<std::size_t>(rank.rank));
    if (rank.peak_activation_bytes != twin.peak_activation_bytes || rank.saved_bytes != twin.saved_bytes) {
      disagree(fmt::format("{}: rank {} peaks at {} bytes, the dry run says {}", name_of_case(c), rank.rank,
                           rank.peak_activation_bytes, twin.peak_activation_bytes));
    }
  }
  return run;
}

ModelConfig claims_v3() { return load_model_config("deepseek-v3"); }
ModelConfig claims_v2_lite() { return load_model_config("deepseek-v2-lite"); }

ForwardBytes forward_bytes(const BlockRun& run) {
  const RankMeasure& rank = run.largest(&RankMeasure::bytes_forward);
  const auto sum = [](const std::map<std::string, std::int64_t>& by_tensor, Collective collective) {
    const auto prefix = fmt::format("{} {} ", name_of(Phase::forward), name_of(collective));
    std::int64_t bytes = 0;
    for (const auto& [key, value] : by_tensor) bytes += key.starts_with(prefix) ? value : 0;
    return bytes;
  };
  ForwardBytes bytes{.all_to_all_sent = sum(rank.bytes_by_tensor, Collective::all_to_all),
                     .all_to_all_received = sum(rank.bytes_received_by_tensor, Collective::all_to_all),
                     .all_gather_sent = sum(rank.bytes_by_tensor, Collective::all_gather),
                     .all_gather_received = sum(rank.bytes_received_by_tensor, Collective::all_gather)};
  const auto peers = static_cast<std::int64_t>(run.ranks.size()) - 1;
  bytes.local_shard = peers > 0 ? bytes.all_gather_sent / peers : 0;
  return bytes;
}

}  // namespace isomer
