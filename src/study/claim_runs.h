// The runs that claims are judged by: dry ones at published sizes, each held against the closed forms of its bytes, and
// real ones at sizes that fit a small machine, each held against its dry twin. What does not agree is kept.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "study/block_run.h"
#include "study/claims.h"

namespace isomer {

/// One block under one layout.
struct ClaimCase {
  ModelConfig config;
  std::string layout;
  int ranks = 8;
  std::int64_t seq = 16384;
  DType dtype = DType::bf16;
  AttentionCore core = AttentionCore::fused;
  MemoryPolicy policy = MemoryPolicy::lean;

  BlockProblem problem() const { return {.config = config, .dtype = dtype, .seq = seq, .core = core}; }
};

class ClaimRuns {
 public:
  /// Scratch of the fused core's backward grows with a rank's threads, so that verdicts would depend on the machine.
  static constexpr int kThreadsPerRank = 1;

  explicit ClaimRuns(const ClaimsOptions& options) : options_(options) {}

  /// Names the claim in what follows: progress and disagreements.
  void begin(const std::string& id);
  bool quick() const { return options_.quick; }
  std::uint64_t seed() const { return options_.seed; }
  const ClaimsOptions& options() const { return options_; }
  void progress(const std::string& what) const;

  /// The dry run; kept, so that claims share it.
  const BlockRun& dry(const ClaimCase& c);
  /// Largest peak of a rank, bytes.
  std::int64_t dry_peak(const ClaimCase& c);
  std::int64_t dry_saved(const ClaimCase& c);
  /// Runs for real, once, with results collected, and holds bytes and peaks against the dry run.
  BlockRun real(const ClaimCase& c, const BlockData& data);
  /// Seeded weights, text and output gradient of a real run.
  BlockData data(const ClaimCase& c) const;

  void disagree(const std::string& what);
  const std::vector<std::string>& disagreements() const { return disagreements_; }

 private:
  void check_bytes(const ClaimCase& c, const BlockRun& run);
  BlockRunOptions run_options(const ClaimCase& c, bool dry) const;

  const ClaimsOptions& options_;
  std::string id_;
  std::map<std::string, BlockRun> dry_runs_;
  std::vector<std::string> disagreements_;
};

/// DeepSeek-V3's dimensions (h 128, d 512, n 128, r 64, v 128), V2-Lite's (h 16), or those of a tiny model for --quick.
ModelConfig claims_v3();
ModelConfig claims_v2_lite();

/// The bytes that a rank sends and receives in its forward, by kind of collective.
struct ForwardBytes {
  std::int64_t all_to_all_sent = 0, all_to_all_received = 0;
  std::int64_t all_gather_sent = 0, all_gather_received = 0;
  std::int64_t local_shard = 0;  // what one rank contributes to the all-gathers

  double sent() const { return static_cast<double>(all_to_all_sent + all_gather_sent); }
  double sent_and_received() const { return sent() + static_cast<double>(all_to_all_received + all_gather_received); }
  /// LAGA's Table 1: all-to-alls sent and received, the all-gather as one local shard.
  double as_published() const { return static_cast<double>(all_to_all_sent + all_to_all_received + local_shard); }
};
ForwardBytes forward_bytes(const BlockRun& run);

}  // namespace isomer
