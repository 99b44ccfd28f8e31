// Running one attention block under one scheme, for real or dry, and measuring all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "layers/attention_core.h"
#include "model/config.h"
#include "model/weights.h"
#include "sharding/layout.h"
#include "sharding/tokens.h"

namespace isomer {

/// One block, y = x + MLA(RMSNorm(x)), on a batch of equally long sequences.
struct BlockProblem {
  ModelConfig config;
  DType dtype = DType::f32;
  std::int64_t seq = 0;
  std::int64_t batch = 1;
  std::int64_t first_position = 0;
  AttentionCore core = AttentionCore::fused;  // a layout's attention=… goes before it
};

/// Weights and tensors that all ranks of all schemes share; shape-only for a dry run.
struct BlockData {
  AttentionWeights weights;
  Tensor x;   // [seq·batch, D], token s of sequence b in row s·batch + b
  Tensor dy;  // the same shape: the gradient of the block's output
};

/// What one rank did in one forward and backward.
struct RankMeasure {
  int rank = 0;
  std::int64_t bytes_forward = 0, bytes_backward = 0, bytes_gradient_sync = 0;  // sent
  std::int64_t bytes_received_forward = 0, bytes_received_backward = 0;
  std::map<std::string, std::int64_t> bytes_by_tensor;           // sent; "forward all_to_all q"
  std::map<std::string, std::int64_t> bytes_received_by_tensor;  // the same keys
  std::int64_t messages = 0;
  std::int64_t peak_activation_bytes = 0;
  std::vector<StandingTensor> standing_at_peak;
  std::int64_t saved_bytes = 0;  // class `saved` at the end of the forward
  std::int64_t untracked_bytes = 0;
  double flops_forward = 0, flops_backward = 0;
  std::map<std::string, double> flops_by_op;    // "forward kv_b_proj"
  std::map<std::string, double> seconds_by_op;  // on the run's clock; of the last repetition
  double seconds = 0;                           // forward + backward, on the run's clock
  double seconds_forward = 0;
  double seconds_waiting = 0;  // in collectives
  double seconds_kernels = 0;
  double seconds_other() const { return std::max(0.0, seconds - seconds_waiting - seconds_kernels); }
};

struct BlockRun {
  std::vector<RankMeasure> ranks;  // at rank 0 of a real run, complete; elsewhere under MPI empty
  bool virtual_clock = false;
  int threads_per_rank = 1;
  // At rank 0 of a real run: assembled outputs.
  Tensor y, dx;  // [seq·batch, D]
  AttentionWeights gradients;

  const RankMeasure& largest(std::int64_t RankMeasure::*field) const;
  double seconds() const;  // of the slowest rank
};

/// What ranks show of their insides to `--dump`: called at rank `rank` with its intermediates by name.
using DumpSink = std::function<void(int rank, const std::string& name, const Tensor& tensor)>;

struct BlockRunOptions {
  GroupOptions group;
  int repetitions = 0;  // timed ones after the first; 0: three, or one where the first took over two seconds
  bool collect_results = true;
  bool drop_transfers = false;  // tests: communication becomes a no-op
  bool poison_memory = false;   // tests: new tensors are filled with NaN
  DumpSink dump;
};

/// Runs `layout` on options.group.num_ranks ranks. Throws std::invalid_argument if it doesn't fit (why_unfit).
BlockRun run_block(const BlockProblem& problem, const BlockData& data, const Layout& layout,
                   const BlockRunOptions& options);

/// The core that a layout runs with.
AttentionCore core_of(const BlockProblem& problem, const Layout& layout);

}  // namespace isomer
