// The implementations of the attention core, best first, the plain reference last. Each says why it declines.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/attention.h"
#include "kernels/attention_problem.h"

namespace isomer {

struct AttentionImplementation {
  std::string_view name;
  /// Why this one can't run `shape` on this processor; empty if it can.
  std::string (*declines)(const AttentionShape& shape);
  /// Null for the reference, which works on the tensors.
  const AttentionBlockKernels* kernels;
};

std::span<const AttentionImplementation> attention_implementations();

/// The one called `name`, or the first that does not decline if `name` is empty. Throws std::invalid_argument for an
/// unknown name, and with the reason for one that declines.
const AttentionImplementation& find_attention_implementation(const AttentionShape& shape, std::string_view name = {});

/// As in attention.h, by the implementation of that name.
void fused_attention_forward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                             std::string_view implementation);
void fused_attention_backward(RankContext& ctx, const AttentionInputs& in, const Tensor& out, const Tensor& lse,
                              const Tensor& dout, const AttentionGradients& gradients, std::string_view implementation);

}  // namespace isomer
