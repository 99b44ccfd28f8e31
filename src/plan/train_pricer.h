// Prices a training step operation by operation: what it takes in all, and the list of what it is made of, from one
// walk over the step.
#pragma once

#include <vector>

#include "cost/scheme_work.h"
#include "plan/decode_step.h"
#include "plan/train_step.h"

namespace isomer {

/// Of one device. With `list`, every operation is added to it as well: seconds and times over the whole step.
class TrainPricer {
 public:
  TrainPricer(const TrainProblem& problem, const Hardware& hardware, const TrainLayout& layout,
              std::vector<PricedOperation>* list = nullptr);

  /// One attention block, forward and backward, `times` times.
  void block(TrainTime& time, std::int64_t times) const;
  /// `count` sequences through all layers of a stage and the head, forward and backward.
  void sequences(TrainTime& time, std::int64_t count) const;
  /// Once a step: sums of gradients, ZeRO-3's gathers (for every one of `count` sequences), the optimiser.
  void once(TrainTime& time, std::int64_t count) const;

 private:
  using Part = double TrainTime::*;
  /// `op`, so many times; `share` of its time.
  void spend(TrainTime& time, Part part, const char* name, Operation op, std::int64_t times, double share = 1) const;

  void core(TrainTime& time, std::int64_t times) const;
  void projections(TrainTime& time, std::int64_t times) const;
  void exchanges(TrainTime& time, std::int64_t times) const;
  void dense_ffn(TrainTime& time, std::int64_t times) const;
  void moe_ffn(TrainTime& time, std::int64_t times) const;
  void links_of_layers(TrainTime& time, std::int64_t layers, std::int64_t moe_layers) const;
  void up_projection(TrainTime& time, Part part, double rows_times_heads, std::int64_t times) const;

  Operation gemm(std::int64_t m, std::int64_t n, std::int64_t k) const;
  Operation attention_core() const;
  Operation collective(OperationKind kind, double bytes, int devices, int span) const;
  Operation exchange(std::int64_t sent, int exchanges) const;
  Operation pass(std::int64_t sent, int passes) const;
  bool is_f32() const { return problem_.activations == DType::f32; }
  /// How often a product is done: forward, two in the backward, and once more where its part is recomputed.
  bool block_again() const { return layout_.recompute >= TrainRecompute::block; }
  bool all_again() const { return layout_.recompute == TrainRecompute::all; }
  double hidden_bytes() const;

  const TrainProblem& problem_;
  const Hardware& hardware_;
  const TrainLayout& layout_;
  std::vector<PricedOperation>* list_;
  ModelConfig columns_;  // as one TP rank sees it
  bool gqa_;
  Layout sequence_;  // without recomputation
  std::int64_t own_;
  TrainAttention attention_;
  SchemeCore core_;
};

}  // namespace isomer
