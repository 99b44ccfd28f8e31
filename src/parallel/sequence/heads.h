// Steps that several schemes share once a rank holds all tokens of its heads.
#pragma once

#include "parallel/sequence/scheme.h"

namespace isomer {

/// Rows of these positions in order, interleaved by batch: one run a sequence of the batch, range and document in it.
std::vector<TokenRun> runs_of(const SequenceBlock& block, const std::vector<IndexRange>& positions);

/// Causal attention of whole sequences (one group); q, k, v [S·batch, heads, width], rope parts optional.
AttentionInputs whole_sequence_inputs(const SequenceBlock& block, Tensor q, Tensor k, Tensor v, Tensor q_rope = {},
                                      Tensor k_rope = {});

/// [k_nope | k_pe on every head]: k_nope [rows, heads, n] strided, k_pe [rows, r] → [rows, heads, n + r].
Tensor concatenate_keys(RankContext& ctx, const Tensor& k_nope, const Tensor& k_pe, MemoryClass memory_class);

/// Whole keys and values of the rank's heads, kept apart from the up-projection's output, which goes.
struct KeysAndValues {
  Tensor k;  // [rows, heads, n + r]
  Tensor v;  // [rows, heads, v]
};
KeysAndValues build_keys_values(RankContext& ctx, const SequenceBlock& block, const Tensor& latent,
                                FunctionScope& scope);

/// What build_keys_values did, backwards: dk and dv (any float type, taken) into dlatent [rows, d + r] (float32,
/// overwritten) and the gradient of kv_b_proj's rows of the rank's heads.
void up_projection_gradients(RankContext& ctx, const SequenceBlock& block, const Tensor& latent, Tensor dk, Tensor dv,
                             const Tensor& dlatent, BlockGradients& gradients);

}  // namespace isomer
