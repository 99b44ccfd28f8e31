// The plain double-precision twin of kernels/attention.h: simple loops over all pairs, the whole softmax row at once.
// Never optimised; what the fast ones are tested against. Not recorded and single-threaded.
#pragma once

#include "kernels/attention.h"

namespace isomer::reference {

/// As fused_attention_forward. Inputs of any dtype are widened to double; out and lse may each be of any dtype, so
/// float64 results of bfloat16 inputs can be had.
void attention_forward(const AttentionInputs& in, const Tensor& out, const Tensor& lse);

/// As fused_attention_backward; all tensors may be of any dtype.
void attention_backward(const AttentionInputs& in, const Tensor& out, const Tensor& lse, const Tensor& dout,
                        const AttentionGradients& gradients);

}  // namespace isomer::reference
