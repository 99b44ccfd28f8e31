// What a configuration says a checkpoint holds, held against what stands in it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/checkpoint.h"
#include "model/config.h"

namespace isomer {

/// fn(name, shape, optional) for every tensor of the whole model under the names of a Hugging Face checkpoint; optional
/// are the biases, which the tensors present decide on.
void for_each_expected_tensor(const ModelConfig& config,
                              const std::function<void(const std::string&, const Shape&, bool optional)>& fn);

/// Tensors of one pattern ("model.layers.*.self_attn.o_proj.weight"), dtype and shape.
struct TensorGroup {
  std::string pattern;
  std::string dtype;  // "BF16", "Q4_1"
  Shape shape;
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};

/// Every number between two dots becomes "*".
std::string pattern_of(std::string_view name);

/// Grouped, by pattern.
std::vector<TensorGroup> group_tensors(const Checkpoint& checkpoint);

struct Inventory {
  std::int64_t num_parameters = 0;    // in the tensors that the model uses
  std::vector<std::string> problems;  // one line a kind, with how many tensors and the first of them
  std::vector<std::string> notes;     // what is there, rightly, and not used
};

/// Missing, extra, wrongly shaped and unreadable tensors.
Inventory take_inventory(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace isomer
