// A rank's replica of a model that trains: float32 master weights, gradients and the optimiser's moments, each one flat
// buffer with the tensors as views, so that a step is one sum over ranks, one norm and one pass.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/rank_context.h"
#include "model/config.h"
#include "model/model_weights.h"

namespace isomer {

struct Parameter {
  std::string name;  // as in a checkpoint
  Shape shape;
  std::int64_t offset = 0;  // in elements of the flat buffers, a multiple of 16
  std::int64_t count = 0;
  bool decays = false;            // weight decay: matrices do, norms and biases don't
  bool is_up_projection = false;  // kv_b_proj, whose gradient some schemes hold by heads
};

class Parameters {
 public:
  /// Shape-only in a dry run. Gradients and moments are zero, weights undefined until `set`.
  Parameters(RankContext& ctx, const ModelConfig& config, DType dtype);

  /// Takes master weights (and the router's correction biases) from tensors of any dtype under the same names. Throws
  /// isomer::Error if one is missing or has another shape.
  void set(const ModelWeights& source);
  /// Rounds the master weights to the dtype that the model computes in; nothing to do for float32.
  void refresh(RankContext& ctx);

  const std::vector<Parameter>& list() const { return list_; }
  std::int64_t num_trained() const { return num_trained_; }
  /// Throws a check's failure for a name that is no parameter's.
  const Parameter& find(const std::string& name) const;
  /// Where the up-projections begin in the flat buffers; they come last.
  std::int64_t first_up_projection() const;
  DType dtype() const { return dtype_; }
  /// A parameter's view of one of the flat buffers.
  Tensor view(const Tensor& flat, const Parameter& parameter) const;

  /// Views in the model's dtype; the correction biases are float32.
  ModelWeights weights;
  Tensor master, gradient, first_moment, second_moment;  // [num_elements] float32
  /// The float32 master weights under the model's names (correction biases included): what a checkpoint holds.
  ModelWeights master_weights;

 private:
  DType dtype_;
  std::vector<Parameter> list_;
  std::map<std::string, std::size_t> index_;
  std::int64_t num_trained_ = 0;
  Tensor rounded_;  // [num_elements] bfloat16, where the dtype is
};

}  // namespace isomer
