// A model's layers over the stages of a pipeline (pp): who has which layers, and what passes between neighbours.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "cost/decode_layout.h"
#include "sharding/tokens.h"

namespace isomer {

/// rank = stage · (ranks of a stage) + place; a stage's ranks share its layers as the layout's other axes say. One
/// stage is the plain engine.
class Pipeline {
 public:
  /// Collective over the layout's ranks.
  Pipeline(Communicator& comm, const DecodeLayout& layout, const ModelConfig& config);

  /// Ranks of this stage, by place.
  Communicator& ranks_of_stage() const { return stage_ ? *stage_ : comm_; }
  int num_stages() const { return line_ ? line_->size() : 1; }
  int stage() const { return line_ ? line_->rank() : 0; }
  IndexRange layers() const { return layers_of(stage()); }
  IndexRange layers_of(int stage) const { return balanced_part(num_layers_, num_stages(), stage); }

  /// x [rows, D] from the stage before.
  Tensor receive(RankContext& ctx, std::int64_t rows, std::int64_t width, DType dtype) const;
  /// x to the next stage; nothing on the last. Keep the work until the step is done.
  Work send(const Tensor& x) const;
  /// The last stage's x on every rank, so that all choose the same tokens: outside of what a step is accounted for.
  void share(RankContext& ctx, const Tensor& x) const;

 private:
  Communicator& comm_;
  std::int64_t num_layers_;
  std::unique_ptr<Communicator> stage_, line_;  // of more than one stage; line: the ranks of this place, by stage
};

}  // namespace isomer
