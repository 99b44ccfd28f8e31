// What a training step takes on one device of a layout: time by part, memory by part, and what the attention block of
// the executor would count.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/scheme_bytes.h"
#include "cost/scheme_work.h"
#include "plan/decode_step.h"
#include "plan/hardware.h"
#include "plan/train_layout.h"

namespace isomer {

struct TrainProblem {
  ModelConfig config;
  std::int64_t seq = 0;
  std::int64_t batch = 64;              // sequences a step; one at a time through a pipeline
  Precision compute = Precision::bf16;  // of matrix products
  DType activations = DType::bf16;      // of the attention block; f32 with compute f32 for machines that train so
  double optimizer_bytes = 12;          // a parameter: master weight and two moments in float32
  double memory_limit_bytes = 0;        // 0: the description's
  double reserved_share = 0.05;
};

/// What a dry run of the scheme counts for one attention block of this layout (heads / TP, one sequence), its
/// recomputation included.
struct TrainAttention {
  SchemeBytes sent;
  SchemeWork work;
};
TrainAttention train_attention(const TrainProblem& problem, const TrainLayout& layout, int rank = 0);

/// Bytes of an element outside the attention block: bfloat16 activations and weights, float32 gradients.
inline constexpr double kActivationBytes = 2, kWeightBytes = 2, kGradientBytes = 4;

/// The layer as one TP rank sees it.
ModelConfig train_columns(const TrainProblem& problem, const TrainLayout& layout);

/// Seconds of one step of one device. Nothing runs beside anything else, unless the hardware is assumed to overlap.
struct TrainTime {
  double core = 0, projections = 0, ffn = 0, head = 0;
  double sp_links = 0;                                    // the scheme's exchanges
  double tp_links = 0, ep_links = 0, pipeline_links = 0;  // priced, not executed
  double recompute = 0, bubble = 0;                       // priced, not executed
  double gradient_links = 0, zero_links = 0;              // sums of gradients; ZeRO-3's gathers
  double optimizer = 0;
  double hidden = 0;  // of links beside kernels, under an assumed overlap
  double total() const;
};
/// What is hidden counts negative.
std::vector<StepShare> shares_of(const TrainTime& time);
/// Whether tests hold what a part of shares_of is priced from to a dry run of the executor; the others are priced, not
/// executed.
bool is_held_to_executor(std::string_view part, const TrainLayout& layout);

/// Bytes of one device.
struct TrainMemory {
  double weights = 0, gradients = 0, optimizer = 0, saved = 0, transient = 0, reserved = 0;
  double total() const { return weights + gradients + optimizer + saved + transient + reserved; }
};

TrainTime train_step_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout);
/// Every operation of a step, longest first; they add up to the step but for the pipeline's bubble and what is hidden.
std::vector<PricedOperation> train_operations(const TrainProblem& problem, const Hardware& hardware,
                                              const TrainLayout& layout);
/// One attention block alone, forward and backward: core, projections, exchanges of the scheme, recomputation. Adds its
/// operations to `list`, if given.
TrainTime attention_block_time(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                               std::vector<PricedOperation>* list = nullptr);
TrainMemory train_memory(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout);
/// `work`: that of train_attention, for callers that have it.
TrainMemory train_memory(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                         const SchemeWork& work);

/// MFU: FLOPs of the model over what all devices could do in that time at peak. The model's are the forward's and twice
/// as many for the backward; nothing that is computed again counts, neither under recompute nor the scores that a fused
/// attention's backward repeats.
double model_flops_utilisation(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
                               double step_s);

}  // namespace isomer
