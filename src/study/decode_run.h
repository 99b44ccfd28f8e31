// Decoding some tokens of a batch under one layout, for real or dry, and measuring all of it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/group.h"
#include "infer/engine.h"

namespace isomer {

/// `batch` sequences of `context` cached positions, and `tokens` decode steps of one new token each.
struct DecodeWorkload {
  ModelConfig config;
  std::shared_ptr<const TplaModel> tpla = nullptr;  // of a converted checkpoint, for the layout `tpla`
  DType dtype = DType::f32;
  std::int64_t context = 0, batch = 1, tokens = 4;
  std::uint64_t seed = 1;
  /// What is cached: rows made up from the seed where empty, else these ids, a sequence each, read by prefill.
  std::vector<std::vector<std::int32_t>> prompts;
};

/// A token of every sequence for each step.
using DecodeTokens = std::vector<std::vector<std::int32_t>>;

/// What one rank did in one step: seconds are those of its median step, all of the same one; bytes and messages those
/// of the last.
struct DecodeMeasure {
  int rank = 0;
  std::int64_t cache_bytes = 0;                       // allocated: whole pages
  std::map<std::string, std::int64_t> bytes_by_name;  // sent, "all_to_all partial o and lse"
  std::int64_t messages = 0;
  std::map<std::string, double> flops_by_name;  // by the operations' shapes: "q_b_proj"
  std::int64_t peak_activation_bytes = 0;       // in that step: workspace and communication buffers
  /// Where rows travel to their experts (dp-ep): own rows that went to each rank's, of all layers.
  std::vector<std::int64_t> routed_rows;
  double seconds = 0;                             // on the run's clock
  double seconds_waiting = 0;                     // in collectives: peers and link, as far as nothing covers it
  std::map<std::string, double> seconds_by_part;  // attention, exchange, projections, ffn, router, other: of kernels

  std::int64_t bytes_sent() const;
};

struct DecodeRun {
  std::vector<DecodeMeasure> ranks;  // at rank 0 complete
  bool virtual_clock = false;
  std::vector<std::vector<double>> logits;  // at rank 0 of a real run: a step, [batch · vocabulary]
  DecodeTokens chosen;                      // by the logits of each step: the greedy tokens
  double seconds() const;                   // of the slowest rank
  const DecodeMeasure& busiest() const;     // the rank that sends most
  const DecodeMeasure& critical() const;    // the rank that waits least, for which the others wait
};

struct DecodeRunOptions {
  GroupOptions group;
  DecodeLayout layout;
  /// Tokens to read, a step each; step 0 alone: each further step reads what the one before chose.
  DecodeTokens read;
  /// Of a dry run: by rank the lowest one that does the same (equal_ranks), which is traced for it. Empty: all are.
  std::vector<int> equal_ranks;
  bool explicit_form = false;  // new tokens by prefill, one at a time: the yardstick
  /// Called at every rank with its intermediates in the last step.
  std::function<void(int rank, const std::string& name, const Tensor& tensor)> dump;
};

/// Whether rows travel to the experts that the router chooses, so that routing decides how many bytes are sent.
bool is_routed(const DecodeLayout& layout);

/// The part of a step that an operation belongs to, by its name in the record.
std::string_view decode_part_of(std::string_view operation);

/// Seconds of a part (DecodeMeasure::seconds_by_part) on the rank that spends most on it; 0 where no rank has it.
double longest_part(const DecodeRun& run, const std::string& part);

/// Throws what the engine throws.
DecodeRun run_decode(const DecodeWorkload& workload, const ModelWeights& weights, const DecodeRunOptions& options);

}  // namespace isomer
